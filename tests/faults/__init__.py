"""What the survivors do when one process of an update is killed or stopped, at every stage: real servers and trainers.

    gate           a place at which a process stops, or falls, when a test has set a trap there
    server_hooks   the places of a server's processes (startup/sitecustomize.py puts them in)
    trainer        the places of a trainer's processes, and how these are started
    cells          stage x victim x mode -> what is expected
    runner         carries out a cell on real processes
    __main__       `make faults`: all cells as a table
"""
