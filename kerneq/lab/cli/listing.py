"""The commands that say what there is: experiments, models, data sets, words, and the claims of the papers, checked."""

import re
import sys
from typing import Annotated

from typer import Argument, Option

from ..console import complain, progress_bars, say, show_table
from .arguments import PACKAGE, AsJson


def experiments(
    words: Annotated[list[str] | None, Argument(help="Only those with all of these words.", metavar="WORD")] = None,
) -> None:
    """List the experiments for `kerneq train` and the sweeps for `kerneq sweep`, a sentence each."""
    from ..tables import summary_table

    wanted, found = [re.compile(rf"\b{re.escape(word)}", re.IGNORECASE) for word in words or ()], 0
    for title, folder in (("kerneq train", "experiments"), ("kerneq sweep", "experiments/sweeps")):
        rows = []
        for file in sorted((PACKAGE / folder).glob("*.toml")):
            sentence = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            if all(word.search(f"{file.stem} {sentence}") for word in wanted):
                rows.append((file.stem, sentence))
        found += len(rows)
        if rows:
            say(f"{title} NAME", "bold")
            show_table(summary_table(rows))
    if not found:
        say(f"No experiment has {' and '.join(words or ())} in its name or its sentence; kerneq experiments lists all.")


def explain(
    word: Annotated[str, Argument(help="A word that kerneq prints, such as residual, gamma or ECE.")] = "",
    markdown: Annotated[bool, Option("--markdown", help="Print all of them, as in docs/glossary.md.")] = False,
) -> None:
    """Say what a word means that kerneq prints; without one, list them."""
    from ..glossary import find_term, read_glossary, write_markdown

    if markdown:
        print(write_markdown(), end="")
    elif word:
        say(": ".join(find_term(word)))
    else:
        say(f"kerneq explain WORD, for: {'; '.join(read_glossary())}")


def data() -> None:
    """List the data sets: which are found under KERNEQ_DATA, which are missing and how to get them."""
    from ..data import data_root, describe
    from ..tables import data_table

    show_table(data_table(describe(), data_root()))


def verify(as_json: AsJson = False) -> None:
    """Check every claim of the papers and of ours by numbers, in half a minute; fails where an error is not known."""
    from ..run.files import to_json
    from ..tables import claims_table, describe_verdicts
    from ..verify.claims import CLAIMS
    from ..verify.search import check_claims

    with progress_bars() as progress:
        findings = list(progress.track(check_claims(CLAIMS), total=len(CLAIMS), description="claims"))
    if as_json:
        print(to_json([finding.row() for finding in findings], indent=2))
    else:
        show_table(claims_table(findings))
        say(describe_verdicts(findings))
    unexplained = [finding for finding in findings if not finding.explained]
    for finding in unexplained:
        words = f"{finding.published}, {finding.claim}: {finding.verdict.value}, {finding.worst}"
        complain(f"{words}. This is not explained.")
    if unexplained:
        sys.exit(1)


def models() -> None:
    """List the models: parameters, equation, paper, published accuracy and ours."""
    from ..tables import describe_models, models_table

    show_table(models_table())
    for sentence in describe_models():
        say(sentence)
