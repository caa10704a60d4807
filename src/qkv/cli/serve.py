"""`qkv serve`: serve databases over HTTP, with a web page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from qkv.cli import options, terminal
from qkv.cli.command import Result
from qkv.errors import missing_extra_error


def serve(
    sources: Annotated[
        list[str] | None,
        options.make_argument(
            "[SOURCES]", "Folders such as books.qkv, or tables to read into memory."
        ),
    ] = None,
    host: Annotated[
        str,
        options.make_option("ADDRESS", "Listen on this address. A public address needs a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        options.make_option(
            "NUMBER", "Listen on this port; 0 chooses a free port.", min=0, max=65535
        ),
    ] = 8000,
    token: Annotated[
        str | None,
        options.make_option(
            "TEXT", "Allow clients with this token to read and write.", envvar="QKV_TOKEN"
        ),
    ] = None,
    read_token: Annotated[
        str | None,
        options.make_option(
            "TEXT", "Allow clients with this token to read.", envvar="QKV_READ_TOKEN"
        ),
    ] = None,
    write: Annotated[
        bool, options.make_option("--write", "Allow every client to write, if no token is set.")
    ] = False,
    cluster: Annotated[
        int | None,
        options.make_option(
            "SHARDS", "Query each folder or store URL with this many Ray processes.", min=1
        ),
    ] = None,
    browse: Annotated[bool, options.make_option("--open", "Open the page in a browser.")] = False,
) -> Iterator[Result]:
    """Serve databases over HTTP: a page and an API.

    The server runs until Ctrl-C. The page is at /, the API at /v1, and its reference at /reference.
    Other machines can connect only if --host is set; they then need a token.
    """
    try:
        from qkv.serve.app import create_app
        from qkv.serve.databases import open_sources
        from qkv.serve.security import Access, is_loopback
        from qkv.serve.server import bind_socket, check_address, run_server
    except ImportError as error:
        name = (error.name or "starlette").partition(".")[0]
        raise missing_extra_error(f"serve needs {name}", "serve") from None
    import socket

    access = Access(token, read_token, write)
    check_address(host, access)
    with bind_socket(host, port) as listener:
        served = open_sources(sources or [], cluster)
        bound_port = listener.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        names = ", ".join(served.databases) or "no database"
        # The socket listens already, so requests before `run_server` wait in its queue.
        terminal.print_note(f"qkv: serving {names} at {url}; Ctrl-C stops it")
        data = {"url": url, "host": host, "port": bound_port, "databases": list(served.databases)}
        yield Result(data, lambda: None)
        if browse:
            import webbrowser

            webbrowser.open(url)
        # Other machines may send this machine's name as Host. On loopback it is refused, because
        # DNS rebinding could forge it.
        hosts = [] if is_loopback(host) else [host, socket.gethostname()]
        run_server(create_app(served, access, hosts), listener)
