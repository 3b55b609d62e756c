"""``python -m metainfer``: the command line without its console script."""

from metainfer.cli.main import main

if __name__ == "__main__":
    main()
