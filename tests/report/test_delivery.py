"""A verdict is never lost: not by a report, a corpus or an output that cannot be written."""

import errno
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from conformance import storage
from conformance.engine.run import cluster, corpus, interesting_cases
from conformance.engine.run.merging import merge
from conformance.engine.run.search import Search, Searched
from conformance.report import WRITERS, conclude, delivery
from conformance.report.delivery import exit_code, show, unwritten
from conformance.storage import unwritable, write_whole
from tests.engine.verdict_helpers import ROWS_WRONG, SMALL, book  # noqa: F401
from tests.report.cli_helpers import smoke

FULL = "No space left on device"


@pytest.fixture
def full(tmp_path) -> str:
    """A report on a full disk: a link that leads to a device without space."""
    (tmp_path / "full.json").symlink_to("/dev/full")
    return str(tmp_path / "full.json")


def refuse(*_, **__) -> None:
    raise OSError(errno.ENOSPC, FULL)


# ---- one file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "out.md"
    write_whole(path, "first")
    path.chmod(0o640)
    write_whole(path, "second ·")
    assert (path.read_text("utf-8"), path.stat().st_mode & 0o777) == ("second ·", 0o640)
    assert os.listdir(tmp_path) == ["out.md"]


def test_a_failed_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "out.md"
    write_whole(path, "first")
    for function in (storage.os, "replace"), (Path, "write_text"):
        with monkeypatch.context() as broken:
            broken.setattr(*function, refuse)
            with pytest.raises(OSError, match=FULL):
                write_whole(path, "second")
        assert path.read_text() == "first"
        assert os.listdir(tmp_path) == ["out.md"]


def test_a_link_still_leads_to_its_file_and_a_device_stays_one(tmp_path, full):
    (tmp_path / "link.md").symlink_to("out.md")
    write_whole(tmp_path / "link.md", "text")
    assert (tmp_path / "link.md").is_symlink() and (tmp_path / "out.md").read_text() == "text"
    with pytest.raises(OSError, match=FULL):
        write_whole(full, "text")
    assert Path("/dev/full").is_char_device()


# ---- before the run


UNWRITABLE = [
    ("text.txt/out.json", "there is no folder .*/text.txt; make it first"),
    ("nowhere/out.json", "there is no folder .*/nowhere; make it first"),
    ("folder.json", "is a folder; give the name of a file"),
    ("/proc/out.json", "/proc cannot be written (.*); give a file in a folder that can"),
]


@pytest.mark.parametrize("verb", [smoke("moe_ref"), ("merge", "text.json"), ("mutants", "--impl", "moe_ref")])
@pytest.mark.parametrize(("path", "sentence"), UNWRITABLE)
def test_a_report_that_cannot_be_written_is_an_error_of_usage(call, workdir, verb, path, sentence):
    (workdir / "folder.json").mkdir()
    code, out, err = call(*verb, "--report", path)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"moe-conformance: --report {path}: {sentence}.*\n", err), err


def test_the_check_leaves_the_folder_as_it_is(tmp_path, monkeypatch):
    write_whole(tmp_path / "out.json", "earlier")
    assert not unwritable(tmp_path / "out.json") and not unwritable(tmp_path / "new.json")
    monkeypatch.setattr(Path, "write_text", refuse)
    assert FULL in unwritable(tmp_path / "new.json")
    assert os.listdir(tmp_path) == ["out.json"]
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests' user may write each file
    assert "the file is read-only" in unwritable(tmp_path / "out.json")


# ---- after the run


def test_the_second_report_is_written_where_the_first_fails(book, tmp_path, full, capfd):  # noqa: F811
    verdict = book.all_pass().verdict()
    assert conclude(verdict, [full, str(tmp_path / "out.md")]) == 3
    out, err = capfd.readouterr()
    assert "CONFORMANT" in out
    assert err == f"moe-conformance: --report {full}: not written: {FULL}\n"
    assert (tmp_path / "out.md").read_text().startswith("# CONFORMANT")
    assert conclude(verdict, [str(tmp_path / "out.md")]) == 0


def test_a_format_that_raises_costs_no_other_report(book, tmp_path, monkeypatch, capfd):  # noqa: F811
    monkeypatch.setitem(WRITERS, ".html", lambda verdict: 1 / 0)
    paths = [str(tmp_path / name) for name in ("out.html", "out.xml")]
    assert conclude(book.all_pass().verdict(), paths) == 3
    out, err = capfd.readouterr()
    assert "CONFORMANT" in out and "out.html: not written: ZeroDivisionError: division by zero" in err
    assert [path.name for path in tmp_path.glob("out.*")] == ["out.xml"]


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5])
def test_only_a_verdict_of_0_becomes_3(code):
    assert exit_code(code, ["a sentence"]) == (code or 3)
    assert exit_code(code, []) == code


@pytest.mark.parametrize(("implementation", "expected"), [("good", 3), ("wrong", 1)])
def test_a_run_prints_its_verdict_and_keeps_its_meaning(call, workdir, full, implementation, expected):
    code, out, err = call(*smoke(implementation, "--report", full, "--report", "out.md"))
    assert code == expected
    assert ("NOT CONFORMANT" in out) == (expected == 1) and "CONFORMANT" in out
    assert f"--report {full}: not written: {FULL}" in err and "Traceback" not in err
    assert "CONFORMANT" in (workdir / "out.md").read_text()


def test_a_merged_verdict_is_printed_where_its_report_fails(call, workdir, full):
    assert call(*smoke("good", "--shard", "1/1", "--report", "shard.json"))[0] == 0
    code, out, err = call("merge", "shard.json", "--report", full, "--report", "merged.json")
    assert (code, "CONFORMANT" in out, FULL in err) == (3, True, True)
    assert json.loads((workdir / "merged.json").read_text())["verdict"] == "CONFORMANT"


# ---- the output


def test_a_verdict_that_standard_output_cannot_take_goes_to_standard_error(monkeypatch, capfd):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        show(["CONFORMANT"])
    assert capfd.readouterr().err == "CONFORMANT\n"


def test_a_reader_that_has_closed_the_output_changes_no_exit_code(book, tmp_path, monkeypatch, capfd):  # noqa: F811
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        verdict = book.all_pass("permute").section("x", "permute", "FAIL").verdict()
        assert conclude(verdict, [str(tmp_path / "out.md")]) == 1
    assert capfd.readouterr().err == ""
    assert (tmp_path / "out.md").exists()


def test_a_full_standard_error_costs_nothing(monkeypatch, full):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert delivery.deliver(0, [full], lambda path: "text") == 3
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the stream's buffer is written once more


def test_every_path_is_tried(tmp_path, full):
    sentences = unwritten([full, str(tmp_path / "a.md"), str(tmp_path / "gone" / "b.md")], lambda path: "text")
    assert [FULL in sentences[0], "No such file or directory" in sentences[1], len(sentences)] == [True, True, 2]


# ---- the corpus


def test_a_failure_whose_case_cannot_be_saved_is_printed_with_its_text(call, workdir):
    code, out, _ = call(*smoke("wrong", "--corpus", "text.txt/kept"))
    assert code == 1
    words = shlex.split(next(line for line in out.splitlines() if line.startswith("  replay")))
    assert json.loads(words[3])["function"] == "permute"
    code, out, _ = call("replay", words[3], "--impl", "wrong")
    assert (code, "FAIL: rows [exact]" in out) == (1, True)


def test_a_minimized_case_that_cannot_be_saved_is_printed(call, workdir):
    minimize = ("minimize", SMALL.changed(tokens=3, routing=(4, 4, 4)).text, "--impl", "wrong")
    for corpus_folder, sentence in (("kept", "saved as"), ("text.txt/kept", "not saved: [Errno 20]")):
        code, out, err = call(*minimize, "--corpus", corpus_folder)
        assert (code, "smallest case" in out, sentence in out) == (1, True, True), err


def test_a_case_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.os, "replace", refuse)
    assert corpus.try_save(tmp_path, SMALL, {}) == f"{corpus.NOT_SAVED}: [Errno {errno.ENOSPC}] {FULL}"
    assert corpus.read_folder(tmp_path) == [] == os.listdir(tmp_path)


def test_a_search_whose_folder_cannot_be_written_keeps_its_failures(tmp_path, monkeypatch):
    search = Search.__new__(Search)
    search.searched, search.failed = Searched(), {}
    search.session = type("Session", (), {"options": type("Options", (), {"implementation": "nobody"})})
    search.progress = type("Progress", (), {"end": staticmethod(lambda: None)})
    search.kept = {"permute": interesting_cases.InterestingCases(tmp_path, seeds=[SMALL], judged={SMALL.id})}
    corpus.save(tmp_path, SMALL, {})
    reached = SMALL.changed(hidden=2)
    search.kept["permute"].reached, search.kept["permute"].seen = {reached: frozenset({"a:1"})}, {"a:1"}
    with monkeypatch.context() as broken:
        broken.setattr(storage.os, "replace", refuse)
        search.end()
    assert FULL in search.searched.unsaved["permute"]
    assert corpus.read_folder(tmp_path) == [SMALL]
    search.end()
    assert corpus.read_folder(tmp_path) == [reached]


def test_a_cluster_saves_no_case_and_still_has_its_verdict(book, tmp_path):  # noqa: F811
    book.all_pass("permute").section("drawn-permute-0", "permute", "FAIL").failure(finding=ROWS_WRONG, error="")
    verdict = merge([book.verdict().record() | {"shard": "1/1"}])
    (tmp_path / "file").touch()
    cluster._save(verdict.failures, tmp_path / "file" / "kept")
    assert verdict.failures[0]["file"].startswith(corpus.NOT_SAVED)
    cluster._save(verdict.failures, tmp_path / "kept")
    assert Path(verdict.failures[0]["file"]) == tmp_path / "kept" / f"{SMALL.id}.json"
