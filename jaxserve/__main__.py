"""`python -m jaxserve` is `jaxserve`."""

from server.cli import run

if __name__ == "__main__":
    run()
