"""Running every service of a run on one machine.

Two processes keep the promise that nothing is left behind: the command (which the user sees and may kill) and the supervisor
(which owns all services, is the reaper of their orphans and ends when the command's pipe closes).
"""
