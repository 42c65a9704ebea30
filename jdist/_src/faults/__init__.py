"""Faults of a job with several processes: reports of hangs, and notices of preemption.

`observation` describes this process, `status_board` exchanges the descriptions between the processes, and `watchdog` is the
thread that warns, reports and ends the job. `preemption_notice` receives SIGTERM and the notices of a platform. `time_limit`
ends a process whose devices do not start.
"""
