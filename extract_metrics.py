"""Collect the results of a sweep:

    python extract_metrics.py --inp_dir sweeps/sizes

writes metrics.csv, with a row for each run and a column for each key of the config in which the runs differ, and the
plots loss.png and throughput.png, which also has the memory, to that folder. Runs may be in progress, failed or not
started; columns without a value are then empty. For a single run, loss.png is its loss curve.

Throughput and MFU exclude the first steps of a run (--warmup), which also allocate memory, fill caches and compile.
"""

from workbench.sweep.table import main

if __name__ == "__main__":
    main(description=__doc__)
