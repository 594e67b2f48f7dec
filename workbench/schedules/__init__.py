"""Pipeline schedules as data: built, checked, simulated, searched, read and written. Only the standard library."""
