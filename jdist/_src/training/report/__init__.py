"""The report of a fit: its charts, and the HTML page.

Read `page` first.
"""
