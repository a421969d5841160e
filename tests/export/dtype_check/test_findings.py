from __future__ import annotations

import json

from halfserve.export.dtype_check.findings import Finding, FindingLog, LeakReport, leak_table, totals
from halfserve.export.dtype_check.source_lines import SourceLine
from tests.whole_words import broken_words, printed

HERE = SourceLine(__file__, 1)


def a_log() -> FindingLog:
    log = FindingLog()
    log.add("factory", "note", HERE, "a", "first", "new_zeros(x, ...)")
    log.add("factory", "error", HERE, "b", "worse", "new_zeros(x, ...)")
    log.add("factory", "warning", HERE, "c", "milder", "new_zeros(x, ...)")
    log.add("epsilon", "warning", None, "cos", "1e-08 is 0", "finfo(x).tiny")
    return log


def test_a_line_is_listed_once_with_its_worst_symptom() -> None:
    first, second = a_log().sorted()
    assert (first.severity, first.symptom, first.module, first.times) == ("error", "worse", "a", 3)
    assert (first.line, first.source) == (1, "from __future__ import annotations")
    assert second.where == "(cos)"


def test_a_removed_finding_is_gone() -> None:
    log = FindingLog()
    log.remove(log.add("squares", "warning", HERE, "", "s", "f"))
    assert log.sorted() == ()


def test_json_holds_every_finding() -> None:
    report = LeakReport(model="Net", findings=a_log().sorted())
    read = json.loads(json.dumps(report.to_json()))
    assert read["counts"] == {"error": 1, "warning": 1, "note": 0}
    assert [Finding(**finding) for finding in read["findings"]] == list(report.findings)
    assert not report.clean


def test_the_text_forms() -> None:
    report = LeakReport(model="Net", findings=a_log().sorted())
    assert totals(report) == "1 error, 1 warning"
    assert str(report).splitlines()[1] == "warning: (cos): epsilon: 1e-08 is 0 (fix: finfo(x).tiny)"
    empty = LeakReport(model="Net", findings=())
    assert (str(empty), totals(empty), empty.clean) == ("Net: no dtype leaks", "no dtype leaks", True)


def test_the_table_keeps_words_whole_in_eighty_columns() -> None:
    log = FindingLog()
    place = SourceLine("transformers/models/bert/modeling_bert.py", 242)
    log.add("factory", "error", place, "encoder.layer.11.attention.self", "gives float32", "new_zeros(hidden_states, ...)")
    assert broken_words(leak_table(LeakReport(model="BertModel", findings=log.sorted()))) == []


def test_the_table_shows_each_finding_with_its_fix() -> None:
    text = printed(leak_table(LeakReport(model="Net", findings=a_log().sorted())), 160)
    for piece in ("errors (wrong numbers or a crash)", "in a, 3 times", "new_zeros(x, ...)", "finfo(x).tiny", "Net: 1 error"):
        assert piece in text
