"""Sphinx settings of the documentation site: `make docs` builds it into build/docs, which opens without a network."""

import matplotlib
import typer
from sphinx.application import Sphinx

import kerneq
from docs import docstrings, examples
from kerneq.lab.cli.app import app as kerneq_program

matplotlib.use("Agg")

project = "kerneq"
author = copyright = "The kerneq maintainers"
release = version = kerneq.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery", "sphinx_copybutton"]
# Records and pages of single experiments hold files that Sphinx must not read as pages.
exclude_patterns = ["results/**", "recipe/**", "gallery/*.ipynb", "gallery/*.py", "gallery/*.json", "gallery/*.zip"]
smartquotes = False  # quotes in formulas and commands stay as they are
myst_heading_anchors = 3  # links to headings, as on the web

examples.copy_examples()
examples.export_explorer()
sphinx_gallery_conf = {
    "examples_dirs": str(examples.COPIES),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/\w+\.py$",  # all of them are run
    "ignore_pattern": "beside_torchdeq",  # no example: it compares the showcases
    "within_subsection_order": "docs.examples.Order",
    "parallel": 2,
    "image_scrapers": ("docs.examples.take_pictures",),
    "reset_modules": ("matplotlib", "docs.examples.reset_torch"),
    "reset_argv": "docs.examples.arguments_of",
    "abort_on_example_error": True,
    "write_computation_times": False,  # that page loads scripts from outside
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_signature": False,
    "first_notebook_cell": examples.FIRST_CELL,
}

html_theme = "furo"
html_title = f"kerneq {version}"
html_static_path = ["_static"]
html_extra_path = [str(examples.EXTRA)]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_prompt_text = "$ "

autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # those of torch and Python say nothing about ours
autodoc_preserve_defaults = True
add_module_names = False
python_display_short_literal_types = True
python_maximum_signature_line_length = 160


def describe_commands(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the commands to their page: usage, what each does, its arguments and options."""
    if page != "reference/commands":
        return
    program = typer.main.get_command(kerneq_program)
    for name, command in program.commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["kerneq", name, *command.collect_usage_pieces(context)])
        source[0] += f"\n## kerneq {name}\n\n{command.help}\n\n```text\n{usage}\n```\n"
        rows = [row for row in (parameter.get_help_record(context) for parameter in command.params) if row]
        rows = [(left, right.replace("\n", " ")) for left, right in rows]
        source[0] += (
            "\n| | |\n|---|---|\n" + "".join(f"| `{left}` | {right} |\n" for left, right in rows) if rows else ""
        )


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("source-read", describe_commands)
