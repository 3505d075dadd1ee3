"""The manual page safe-gpu(1), made from the parsers of the command, and what a build makes of it and of the README.

``python tools/man_page.py`` prints the page. It needs the sources only, none of the packages that they depend on.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGE = "share/man/man1/safe-gpu.1"
DATE = "2026-11-23"  # of the release: the day of the build would make each build another file

DESCRIPTION = """safe-gpu claims GPUs on a Linux host that several people share. It chooses GPUs that are free, locks
each of them for as long as the job lives, sets CUDA_VISIBLE_DEVICES for the command that it becomes, and binds that
command to the CPUs next to the GPUs. Claims that must wait form one queue on the host: first come, first served. No
daemon and no root rights are needed.

Without a command, safe-gpu prints help. safe-gpu help COMMAND prints the options of a command."""
FURTHER_CODES = {
    0: "success",
    1: "doctor: a check failed; policy --check: the file would be ignored; status of several hosts: some have answered",
    74: "the output cannot be written",
    141: "the reader of the output has closed it",
}
FURTHER_VARIABLES = {"CUDA_VISIBLE_DEVICES": "limits which GPUs a claim chooses from; run sets it for the command"}
SEE_ALSO = "nvidia-smi(1), numactl(8), taskset(1), qsub(1), sbatch(1)"


def get_build_hook() -> Any:
    """Return the hook's class; hatchling finds this function by its name."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class ManPage(BuildHookInterface):  # type: ignore[type-arg]
        """Adds the page to a wheel; an installer then writes it to share/man of the environment."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            self._directory = tempfile.TemporaryDirectory()
            path = os.path.join(self._directory.name, "safe-gpu.1")
            with open(path, "wb") as file:
                subprocess.run([sys.executable, "-I", "-B", __file__], stdout=file, check=True)
            build_data["shared_data"][path] = PAGE

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            self._directory.cleanup()

    return ManPage


def get_metadata_hook() -> Any:
    """Return the hook's class; hatchling finds this function by its name."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    class IndexPage(MetadataHookInterface):
        """Sets the long description of the package, and refuses Pythons on which it does not run."""

        def update(self, metadata: dict[str, Any]) -> None:
            if sys.implementation.name != "cpython":
                sys.exit("safe_gpu needs CPython: install it with the pip of CPython's python3")
            metadata["readme"] = {"content-type": "text/markdown", "text": index_page(README.read_text())}

    return IndexPage


def index_page(text: str) -> str:
    """Return a page in Markdown as the package index shows it, where links to pages of the checkout lead nowhere.

    It has no pictures, and paths in place of links that are not of the web.

    >>> index_page("![a picture](status.svg) [Tests](tests/README.md#screens), [Slurm](https://slurm.schedmd.com)")
    ' Tests (`tests/README.md`), [Slurm](https://slurm.schedmd.com)'
    """
    text = re.sub(r"!\[[^]]*\]\((?!https:)[^)]*\)", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https:)([^)#]+)[^)]*\)", r"\1 (`\2`)", text)


def page() -> str:
    """Return the page in the language of man(7)."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from safe_gpu import __version__
    from safe_gpu.cli.commands import COMMANDS, parser_of, top_parser
    from safe_gpu.settings.variables import VARIABLES

    top, parsers = top_parser(), {name: parser_of(name) for name in COMMANDS}
    for parser in (top, *parsers.values()):
        parser.color = False  # of Python 3.14
    title, _, _ = (top.description or "").partition("\n")
    lines = [f'.TH SAFE-GPU 1 "{DATE}" "safe_gpu {__version__}" "User Commands"', ".nh"]
    lines += [".SH NAME", f"safe\\-gpu \\- {prose(title[0].lower() + title[1:].rstrip('.'))}"]
    lines += [".SH SYNOPSIS", usage(top), ".SH DESCRIPTION"]
    lines += [*paragraphs(DESCRIPTION.split("\n\n")), *options(top)]
    lines.append(".SH COMMANDS")
    told: dict[str, str] = {}
    for name, parser in parsers.items():
        lines += [f".SS {name}", usage(parser), *paragraphs([parser.description or ""])]
        lines += [*options(parser, told, name), *paragraphs(epilog(parser, ""))]
    meanings = {name: variable.meaning for name, variable in VARIABLES.items()}
    lines += [".SH ENVIRONMENT", *entries(meanings | FURTHER_VARIABLES), ".SH FILES", *entries(files())]
    lines += [".SH EXIT STATUS", *paragraphs(["With run and bind it is the status of the command. Else:"])]
    listed = re.findall(r"(\d+) ([^,]+)", " ".join(epilog(parsers["run"], "exit codes")))
    codes = FURTHER_CODES | {int(number): meaning for number, meaning in listed}
    lines += entries({str(number): codes[number] for number in sorted(codes)})
    found = [line for one in (top, *parsers.values()) for text in epilog(one, "example") for line in text.splitlines()]
    lines += [".SH EXAMPLES", *examples(found)]
    lines += [".SH SEE ALSO", fill(re.sub(r"([-\w]+)(?=\()", r"\\fB\1\\fR", SEE_ALSO).replace("-", "\\-"))]
    return re.sub(r"(?m)^(\.S[HS] .*\n)\.PP\n", r"\1", "\n".join(lines) + "\n")


def files() -> dict[str, str]:
    """Return each file -> what it is for."""
    from safe_gpu.cli.setup import RULE
    from safe_gpu.coordination.directory import ADMIN_DIR, DEFAULT_DIR
    from safe_gpu.coordination.older_package import LOCK_FILE
    from safe_gpu.settings.variables import HOST_FILES

    return {
        DEFAULT_DIR: "The state directory, with the claims, the queue and the history of the host, unless SAFE_GPU_DIR "
        "or the settings name another.",
        "~/.config/safe-gpu/config.ini": "The hosts of status --all-hosts, and what starts safe-gpu there.",
        HOST_FILES[0]: "The administrator's settings and limits for this host.",
        f"{os.path.dirname(HOST_FILES[0])}/closed": "The GPUs that nobody may claim, or not now: see drain.",
        ADMIN_DIR: "The state directory that setup makes.",
        RULE: "Keeps root's state directory from being cleaned, and makes it again at boot; written by setup.",
        f"{os.path.dirname(LOCK_FILE)}/": "The lock of safe-gpu 1.x and 2.0, which claims take too where it exists.",
    }


def usage(parser: argparse.ArgumentParser) -> str:
    """Return how the command is called, its name in bold."""
    words = " ".join(parser.format_usage().split()).removeprefix(f"usage: {parser.prog}")
    return fill(f"\\fB{code(parser.prog)}\\fR{code(words.replace(' [-h]', ''))}")


def options(parser: argparse.ArgumentParser, told: dict[str, str] | None = None, name: str = "") -> Iterator[str]:
    """Yield the options by group, each with its help.

    Args:
        parser: whose options.
        told: groups of options -> the command that has told of them, to which is referred then. It is added to.
        name: the command.
    """
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        text = "\n".join(line for one in shown if told is None or one.dest != "help" for line in option(parser, one))
        if text and group not in (parser._positionals, parser._optionals):
            earlier = (told or {}).get(text)
            yield ".PP"
            yield f"\\fI{group.title}\\fR" + (f": as for \\fB{earlier}\\fR." if earlier else "")
            text = "" if earlier else text
            if told is not None and text:
                told[text] = name
        yield from text.splitlines()


def option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return one option or argument with its help."""
    formatter = parser._get_formatter()
    value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    if not action.option_strings:
        value = str(action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}")
    names = ", ".join(f"\\fB{code(name)}\\fR" for name in action.option_strings)
    written = " ".join(filter(None, (names, value and f"\\fI{code(value)}\\fR")))
    return [".TP", written, prose(sentence(formatter._expand_help(action)))]


def epilog(parser: argparse.ArgumentParser, kind: str) -> list[str]:
    """Return the paragraphs of an epilog that begin with ``kind`` and a colon; those without a title for ""."""
    found = []
    for text in (parser.epilog or "").split("\n\n"):
        title = re.match(r"(examples?|exit codes|environment):\s", text)
        if title[1].startswith(kind) if title and kind else not title and not kind:
            found.append(text[title.end() :] if title else text)
    return [text for text in found if text.strip()]


def examples(lines: list[str]) -> Iterator[str]:
    """Yield each command once, below what stands beside it."""
    shown = set()
    for line in lines:
        command, _, remark = line.strip().partition("   ")
        if command in shown:
            continue
        shown.add(command)
        yield ".PP"
        if remark:
            yield prose(sentence(f"{remark.strip()}:"))
        yield from (".RS 4", ".nf", code(command), ".fi", ".RE")


def entries(table: Mapping[str, str]) -> list[str]:
    """Return a list of terms with their meanings."""
    return [line for term, text in table.items() for line in (".TP", f"\\fB{code(term)}\\fR", prose(sentence(text)))]


def paragraphs(texts: list[str]) -> list[str]:
    """Return texts as paragraphs."""
    return [line for text in texts if text for line in (".PP", prose(sentence(text)))]


def sentence(text: str) -> str:
    """Return a text with a full stop, and with a capital letter unless it begins with a name or a value."""
    text = " ".join(text.split())
    begun = text[0].upper() + text[1:] if re.match(r"[a-z]+([; ]|$)", text) else text
    return begun if begun.endswith((".", ":", "?")) else f"{begun}."


def fill(text: str) -> str:
    """Return a text in lines of at most 80 columns of which none is taken for a request."""
    lines = textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


def code(text: str) -> str:
    """Return a text that is typed: each dash is one that can be pasted."""
    for character, escape in {"\\": "\\e", "-": "\\-", "~": "\\(ti", "^": "\\(ha", "'": "\\(aq", "`": "\\(ga"}.items():
        text = text.replace(character, escape)
    return f"\\&{text}" if text.startswith(".") else text


def prose(text: str) -> str:
    """Return a text with the dashes of its options, of ranges and of file names as they are typed."""
    words = " ".join(text.split()).replace("\\", "\\e").split(" ")
    typed = re.compile(r"[(']?-|.*[/_=]|.*\d-\d|safe-gpu")
    return fill(" ".join(word.replace("-", "\\-") if typed.match(word) else word for word in words))


if __name__ == "__main__":
    sys.stdout.write(page())
