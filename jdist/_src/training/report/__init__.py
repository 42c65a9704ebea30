"""The report of a fit: charts as SVG and matplotlib figures, and the HTML page.

Read `page` first.
"""
