"""The entry point of `paramstore` and of `python -m paramstore`."""


def main() -> None:
    """Runs the command line. From its first line on Ctrl-C ends the process at once, until a command handles it itself.

    Python's own handler would raise KeyboardInterrupt wherever the process is: within an import of C code it is lost, or
    becomes another error. SIGTERM and SIGHUP have the kernel's action already; ignored signals, as under nohup, stay ignored.
    """
    # The module `signal` imports others, which takes milliseconds in which Ctrl-C would still give a traceback.
    import _signal as signal  # type: ignore[import-not-found]  # typeshed has the public one only

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from paramstore.cli.main import main as run
    from paramstore.cli.signals import end_as_told

    try:
        run()
    finally:
        end_as_told()


if __name__ == "__main__":
    main()
