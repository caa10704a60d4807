"""`qkv serve`: databases over HTTP, with a page to look at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from qkv.cli import options, terminal
from qkv.cli.command import Result
from qkv.errors import MissingExtraError


def serve(
    sources: Annotated[
        list[str] | None,
        options.make_argument(
            "[SOURCES]", "Folders such as books.qkv, or tables, which are read into memory."
        ),
    ] = None,
    host: Annotated[
        str, options.make_option("ADDRESS", "Where to listen; one that others reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, options.make_option("NUMBER", "0 takes a free one.", min=0, max=65535)
    ] = 8000,
    token: Annotated[
        str | None,
        options.make_option("TEXT", "Whoever sends it may read and write.", envvar="QKV_TOKEN"),
    ] = None,
    read_token: Annotated[
        str | None,
        options.make_option("TEXT", "Whoever sends it may read.", envvar="QKV_READ_TOKEN"),
    ] = None,
    write: Annotated[
        bool, options.make_option("--write", "Without tokens: whoever reaches it may write too.")
    ] = False,
    cluster: Annotated[
        int | None,
        options.make_option(
            "SHARDS", "Ask each folder, or store at a URL, by so many processes on Ray.", min=1
        ),
    ] = None,
    browse: Annotated[bool, options.make_option("--open", "Open the page in a browser.")] = False,
) -> Iterator[Result]:
    """Serve databases over HTTP: a page and an API.

    Until Ctrl-C; the page is at /, the API at /v1, its reference at /reference. Others on the
    network reach it only by --host, and then only with a token.
    """
    try:
        from qkv.serve.app import create_app
        from qkv.serve.databases import open_sources
        from qkv.serve.security import Access, is_loopback
        from qkv.serve.server import bind_socket, check_address, run_server
    except ImportError as error:
        name = (error.name or "starlette").partition(".")[0]
        raise MissingExtraError(f'serve needs {name}: pip install "qkv[serve]"') from None
    import socket

    access = Access(token, read_token, write)
    check_address(host, access)
    with bind_socket(host, port) as place:
        served = open_sources(sources or [], cluster)
        found = place.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{found}"
        names = ", ".join(served.databases) or "no database"
        # Who asks before the server listens to it waits in the socket's queue.
        terminal.print_note(f"qkv: serving {names} at {url}; Ctrl-C ends it")
        told = {"url": url, "host": host, "port": found, "databases": list(served.databases)}
        yield Result(told, lambda: None)
        if browse:
            import webbrowser

            webbrowser.open(url)
        # By its own name it is reached from elsewhere; on loopback a name may be anyone's.
        hosts = [] if is_loopback(host) else [host, socket.gethostname()]
        run_server(create_app(served, access, hosts), place)
