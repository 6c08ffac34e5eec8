"""Figures from records with exact times, each by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lean_engine.bench.serving.benchmark import LoadOptions
from lean_engine.bench.serving.load import ClientHealth, LoadResult
from lean_engine.bench.serving.record import Record
from lean_engine.bench.serving.report import ServeReport, Slos, make_report
from lean_engine.bench.serving.speculation import parse_counts, speculation
from lean_engine.bench.summary import Ratio, distribution, percentile, ratio_of, t_975
from lean_engine.cli.bench_serve_text import block_text, notes_text


def answered(sent: float, *deltas: float, scheduled: float | None = None, tokens: int | None = None) -> Record:
    record = Record(0, len(deltas), 10, sent if scheduled is None else scheduled, sent, sent)
    record.delta_times = list(deltas)
    record.ended_at = deltas[-1]
    record.outcome = "completed"
    record.num_output_tokens = len(deltas) if tokens is None else tokens
    record.usage_prompt_tokens, record.usage_completion_tokens = 10, record.num_output_tokens
    return record


def failed(sent: float, ended: float, outcome: Any, error: str = "", *deltas: float) -> Record:
    return Record(0, 5, 10, sent, sent, sent, list(deltas), ended, outcome, error)


RECORDS = [
    answered(0.0, 0.5, 0.75, 1.0),
    answered(0.25, 0.5),
    answered(1.0, 1.25, 1.5, 3.5, scheduled=0.5),
    failed(0.0, 1.0, "error", "HTTP 500: no"),
    failed(1.0, 2.5, "cut", "cut after 2 deltas", 1.5, 1.75),
    failed(1.0, 1.0, "refused", "HTTP 429: no"),
    failed(3.0, 3.5, "unfinished", "interrupted"),
]


def report_of(records: list[Record], health: ClientHealth | None = None, **more: Any) -> ServeReport:
    return make_report(LoadResult(records, 4.0, health or ClientHealth(0.1), False, 0), **more)


def test_only_completed_requests_enter_the_figures() -> None:
    totals = report_of(RECORDS, slos=Slos({"ttft": 300, "e2el": 1000})).totals()
    assert totals == {
        "duration": 4.0,
        "completed": 3,
        "failed": 3,
        "total_input_tokens": 30,
        "total_output_tokens": 7,
        "request_throughput": 0.75,
        "request_goodput": 0.25,  # the second one
        "output_throughput": 1.75,
        "total_token_throughput": 37 / 4,
        "max_output_tokens_per_s": 3.0,  # 0.5, 0.75 and 0.5 in the first second; 1.0, 1.25, 1.5 in the next
        "max_concurrent_requests": 3,
    }


def test_latencies_by_hand() -> None:
    latencies = report_of(RECORDS, percents=(50, 99.9)).latencies()
    assert latencies["mean_ttft_ms"] == pytest.approx(1000 * (0.5 + 0.25 + 0.25) / 3)
    assert latencies["median_ttft_ms"] == 250
    assert latencies["mean_tpot_ms"] == 1000 * (0.25 + 1.125) / 2  # an answer of one token has none
    assert latencies["p50_itl_ms"] == 250
    assert latencies["p99.9_itl_ms"] == pytest.approx(np.percentile([250, 250, 250, 2000], 99.9))
    assert latencies["mean_e2el_ms"] == 1000 * (1.0 + 0.25 + 2.5) / 3
    assert latencies["std_e2el_ms"] == pytest.approx(np.std([1000, 250, 2500]))


def test_without_a_completed_request_nothing_is_made_up() -> None:
    report = report_of(RECORDS[3:])
    assert report.totals()["output_throughput"] == 0
    assert set(report.latencies().values()) == {None}
    assert report.details()["ttfts"] == [None] * 4


def test_what_a_user_waits_begins_with_the_schedule() -> None:
    found = report_of(RECORDS, has_schedule=True).counts()["from_schedule"]
    assert found["mean_ttft_ms"] == pytest.approx(1000 * (0.5 + 0.25 + 0.75) / 3)
    assert found["mean_e2el_ms"] == pytest.approx(1000 * (1.0 + 0.25 + 3.0) / 3)
    assert report_of(RECORDS).counts()["from_schedule"] == {}


def test_a_delta_of_several_tokens_counts_for_all_of_them() -> None:
    report = report_of([answered(0.0, 0.5, 1.5, tokens=8), answered(0.0, 0.75, tokens=0)])
    assert report.totals()["max_output_tokens_per_s"] == 4
    assert report.latencies()["mean_tpot_ms"] == pytest.approx(1000 / 7)
    assert report.counts()["usage_differs_from_deltas"] == 2


def test_failures_are_counted_by_kind_and_message() -> None:
    counts = report_of(RECORDS).counts()
    assert counts["failures"] == {
        "error": 1,
        "refused": 1,
        "cut": 1,
        "messages": {"HTTP 500: no": 1, "cut after 2 deltas": 1, "HTTP 429: no": 1},
    }
    assert (counts["unfinished"], counts["unsent"]) == (1, 0)
    details = report_of(RECORDS).details()
    assert details["latencies"] == [1.0, 0.25, 2.5, None, None, None, None]
    assert details["output_lens"] == [3, 1, 3, 0, 0, 0, 0]
    assert {len(values) for values in details.values()} == {7}


def test_requests_that_follow_each_other_do_not_overlap() -> None:
    assert report_of([answered(0.0, 1.0), answered(1.0, 2.0)]).max_concurrent == 1


@pytest.mark.parametrize(
    ("cpu", "lag", "late", "expected"),
    [
        (0.4, 0.001, 0.0, []),
        (3.6, 0.001, 0.0, ["the client used 90 % of a CPU"]),
        (0.4, 0.02, 0.0, ["the client was up to 20.0 ms (p99) late in reading answers"]),
        (0.4, 0.001, 0.01, ["3 requests were sent late, p99 10.0 ms"]),
    ],
)
def test_a_client_that_is_too_slow_says_so(cpu: float, lag: float, late: float, expected: list[str]) -> None:
    records = [answered(1.0 + late, 2.0) for _ in range(3)]
    for record in records:
        record.due_at = 1.0
    client = report_of(records, ClientHealth(cpu, [lag] * 100), has_schedule=True).client
    assert client.is_bottleneck == bool(expected)
    assert all(text in found for text, found in zip(expected, client.warnings(), strict=True))
    at_once = report_of(records, ClientHealth(cpu, [lag] * 100)).client  # a burst cannot be sent in no time
    assert "sent late" not in str(at_once.warnings())


def test_the_printed_block() -> None:
    options = LoadOptions(request_rate=2.0, max_concurrency=8, percents=(99,))
    drafts = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 20}
    figures = {f"spec_decode_{'num_' if name == 'drafts' else ''}{name}": n for name, n in drafts.items()}
    figures |= {"spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": 3.0}
    figures["spec_decode_per_position_acceptance_rates"] = [0.9]
    report = report_of(RECORDS, slos=Slos({"ttft": 300}))
    lines = block_text(report, options, ["ttft", "e2el"], figures).splitlines()
    assert {len(line) for line in lines} - {len("Per-position acceptance (%):")} == {50, 51}
    assert [" ".join(line.split()) for line in lines] == [
        "============ Serving Benchmark Result ============",
        "Successful requests: 3",
        "Failed requests: 3",
        "Maximum request concurrency: 8",
        "Request rate configured (RPS): 2.00",
        "Benchmark duration (s): 4.00",
        "Total input tokens: 30",
        "Total generated tokens: 7",
        "Request throughput (req/s): 0.75",
        "Request goodput (req/s): 0.50",
        "Output token throughput (tok/s): 1.75",
        "Peak output token throughput (tok/s): 3.00",
        "Peak concurrent requests: 3.00",
        "Total token throughput (tok/s): 9.25",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms): 333.33",
        "Median TTFT (ms): 250.00",
        "P99 TTFT (ms): 495.00",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms): 1250.00",
        "Median E2EL (ms): 1000.00",
        "P99 E2EL (ms): 2470.00",
        "---------------Speculative Decoding---------------",
        "Acceptance rate (%): 50.00",
        "Acceptance length: 3.00",
        "Drafts: 10",
        "Draft tokens: 40",
        "Accepted tokens: 20",
        "Per-position acceptance (%):",
        "Position 0: 90.00",
        "==================================================",
    ]
    assert lines[1] == f"{'Successful requests:':<40} {3:<10}"


def test_the_notes_say_what_the_block_does_not() -> None:
    notes = notes_text(report_of(RECORDS, has_schedule=True))
    assert "1 errors, 1 refused (429), 1 cut streams\n  1 × HTTP 500: no\n" in notes
    assert "1 requests under way, 0 not sent" in notes
    assert "TTFT from schedule (ms):                 mean 500.00, median 500.00, P99 745.00" in notes
    assert "2 % of a CPU" in notes


# -- speculation


def exposition(drafts: int, accepted: tuple[int, int]) -> str:
    lines = [
        "# TYPE vllm:spec_decode_num_drafts counter",
        f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0',
    ]
    lines += [f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {4 * drafts}']
    lines += [f"vllm:spec_decode_num_accepted_tokens_total {sum(accepted)}", "vllm:other_total 7"]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}",engine="0"}} {count}'
        for i, count in enumerate(accepted)
    ]
    return "\n".join(lines)


def test_speculation_is_what_happened_in_between() -> None:
    before, after = parse_counts(exposition(10, (5, 5))), parse_counts(exposition(30, (20, 10)))
    assert speculation(before, after) == {
        "spec_decode_acceptance_rate": 25.0,
        "spec_decode_acceptance_length": 2.0,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 80,
        "spec_decode_accepted_tokens": 20,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.25],
    }
    assert speculation(None, before)["spec_decode_num_drafts"] == 10
    assert speculation(after, after) == speculation(None, None) == {}
    assert parse_counts("vllm:other_total 7") is None


# -- samples


def test_percentiles_are_numpys() -> None:
    values = sorted([5.0, 1.0, 4.0, 2.0, 3.5, 9.0])
    for percent in (0, 1, 25, 50, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert distribution([], [50]) is None


def test_quantiles_of_student_reach_the_normal() -> None:
    assert [t_975(1), t_975(2), t_975(19)] == [12.706, 4.303, 2.093]
    assert t_975(20) == pytest.approx(2.086, abs=0.01)
    assert 6.0 < t_975(1.5) < 7.2  # 6.2 by integration
    assert t_975(30) == pytest.approx(2.042, abs=0.003)
    assert t_975(1e9) == pytest.approx(1.96, abs=0.001)


def test_a_ratio_is_noise_unless_the_samples_show_it() -> None:
    assert not ratio_of([10, 11, 10.5], [20, 21, 22]).is_noise  # type: ignore[union-attr]
    found = ratio_of([10, 12, 8], [11, 13, 9])
    assert found is not None
    assert found.is_noise
    assert found.value == pytest.approx((11 * 13 * 9 / (10 * 12 * 8)) ** (1 / 3))
    assert not ratio_of([10, 12, 8], [11, 13.2, 8.81], is_paired=True).is_noise  # type: ignore[union-attr]
    assert ratio_of([10], [20]) == Ratio(pytest.approx(2.0), 0.0, math.inf)  # type: ignore[arg-type]
    assert ratio_of([10, 10], [20, 20]) == Ratio(*[pytest.approx(2.0)] * 3)  # type: ignore[arg-type]
    assert ratio_of([0, 1], [1, 1]) is None


def test_welchs_interval_by_hand() -> None:
    a, b = [1.0, math.e], [math.e, math.e**3]  # logarithms 0, 1 and 1, 3: variances 0.5 and 2
    found = ratio_of(a, b)
    assert found is not None
    error, degrees = math.sqrt(0.25 + 1.0), 1.25**2 / (0.25**2 + 1.0**2)
    assert math.log(found.high) - math.log(found.value) == pytest.approx(t_975(degrees) * error)
