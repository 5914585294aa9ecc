"""The command that opens a page on which one watches equilibria being found."""

import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..console import say
from .arguments import Checkpoint, Device, complete


def explore(
    run: Annotated[
        Path | None,
        Argument(
            metavar="RUN",
            autocompletion=complete("weights/*"),
            help="A run folder, or the name of weights that ship; by default the smallest of these.",
        ),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    browser: Annotated[bool, Option(help="Open the page in the browser, or only print its address.")] = True,
    file: Annotated[
        Path | None, Option("--export", help="Write the page with three stored examples instead.", metavar="FILE.html")
    ] = None,
) -> None:
    """Open a page on this machine: choose or drop a picture, and watch its equilibria being found step by step."""
    from .. import explore as page
    from ..evaluate import TrainedRun

    with tempfile.TemporaryDirectory() as folder:
        trained = TrainedRun.open(run or page.choose_run(Path(folder)), checkpoint, device)
        if file is not None:
            page.export(trained, file)
            say(f"Written to {file}")
            return
        try:
            with page.Server(trained) as server:
                say(f"{trained.run.name} at {server.url} (Ctrl-C ends it)")
                if browser:
                    threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()  # may wait
                server.run()
        except KeyboardInterrupt:
            say("Closed.")
