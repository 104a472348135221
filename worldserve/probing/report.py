"""A probing's findings as text, as JSON, and as one self-contained page."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldserve.contract import fingerprint
from worldserve.probing.finding import Finding, Verdict
from worldserve.probing.probe import Report

_MARKS = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.NOT_APPLICABLE: "n/a "}
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}
section{border-left:4px solid #2a7;padding:.1em 1em;margin:1em 0;background:#fafafa}section.fail{border-color:#c33}
section.na{border-color:#aaa;color:#555}h2{font-size:1.05em;margin:.5em 0}figure{display:inline-block;margin:.3em}
img{image-rendering:pixelated;width:192px;display:block}figcaption{font-size:12px;color:#555}code{font-size:12px}
table{border-collapse:collapse;font-size:13px}td{padding:0 1em 0 0}"""


def png(frame: NDArray[np.uint8]) -> bytes:
    """A frame, uint8 (height, width, 3), as PNG (W3C PNG specification, colour type 2, filter 0)."""
    height, width, _ = frame.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), frame.reshape(height, width * 3)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def as_text(report: Report, target: str, faults: Sequence[str] = ()) -> str:
    """Two lines for a probe that failed, one for any other."""
    lines = [f"{target}: {report.run.contract.provenance.kind} {report.run.contract.provenance.backend}"]
    if faults:
        lines.append(f"faults made on purpose: {', '.join(faults)}")
    for finding in report.findings:
        said = finding.cause if finding.verdict is Verdict.NOT_APPLICABLE else finding.evidence
        lines.append(f"{_MARKS[finding.verdict]} {finding.probe}: {said}")
        if finding.failed:
            lines.append(f"     {finding.cause}")
    lines.append(
        f"{report.count(Verdict.PASS)} passed, {report.count(Verdict.FAIL)} failed, "
        f"{report.count(Verdict.NOT_APPLICABLE)} not applicable; {len(report.run.traces)} episodes, "
        f"{report.run.steps} chunks of {report.run.script.interface.timing.chunk_actions} actions"
    )
    return "\n".join(lines) + "\n"


def as_mapping(report: Report, target: str, faults: Sequence[str] = ()) -> dict[str, Any]:
    """What `--json` writes; non-finite figures are null."""
    contract, question = report.run.contract, report.run.question
    return {
        "target": target,
        "kind": contract.provenance.kind,
        "backend": contract.provenance.backend,
        "interface": fingerprint(contract.interface),
        "provenance": fingerprint(contract.provenance),
        "faults": list(faults),
        "state": question.state,
        "other_state": question.other_state,
        "seed": question.seed,
        "episodes": len(report.run.traces),
        "chunks": report.run.steps,
        "findings": [
            {
                "probe": finding.probe,
                "question": finding.question,
                "verdict": finding.verdict.value,
                "evidence": finding.evidence,
                "cause": finding.cause,
                "numbers": {name: _plain(value) for name, value in finding.numbers.items()},
            }
            for finding in report.findings
        ],
    }


def _plain(value: float | int | str | bool | None) -> float | int | str | bool | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_html(report: Report, target: str, faults: Sequence[str] = ()) -> str:
    """One page with every finding, its figures and its pictures; nothing is loaded from elsewhere."""
    contract = report.run.contract
    order = {Verdict.FAIL: 0, Verdict.PASS: 1, Verdict.NOT_APPLICABLE: 2}
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>contract probe {html.escape(target)}</title><style>{_STYLE}</style>",
        f"<h1>Contract probe of {html.escape(target)}</h1>",
        f"<p>{html.escape(contract.provenance.kind)} {html.escape(contract.provenance.backend)}, interface "
        f"<code>{fingerprint(contract.interface)}</code>, provenance "
        f"<code>{fingerprint(contract.provenance)}</code></p>",
        f"<p>Faults made on purpose: {html.escape(', '.join(faults))}</p>" if faults else "",
        f"<p>{html.escape(as_text(report, target).splitlines()[-1])}</p>",
        *(_section(finding) for finding in sorted(report.findings, key=lambda f: order[f.verdict])),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _section(finding: Finding) -> str:
    kind = {Verdict.FAIL: "fail", Verdict.NOT_APPLICABLE: "na"}.get(finding.verdict, "")
    figures = "".join(
        f"<figure><img alt='' src='data:image/png;base64,{base64.b64encode(png(frame)).decode()}'>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, frame in finding.strip
    )
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{html.escape(f'{value:.4g}' if isinstance(value, float) else str(value))}"
        for name, value in finding.numbers.items()
    )
    cause = f"<p><b>{html.escape(finding.cause)}</b></p>" if finding.cause else ""
    return (
        f"<section class='{kind}'><h2>{html.escape(finding.probe)}: {finding.verdict.value}</h2>"
        f"<p>{html.escape(finding.question)}<br>{html.escape(finding.evidence)}</p>{cause}{figures}"
        f"<table>{rows}</table></section>"
    )
