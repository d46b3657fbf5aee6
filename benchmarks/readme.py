"""Writes the README's tables from benchmarks/results: `python -m benchmarks.readme`; `--check` only compares."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from benchmarks.record import RESULTS, ROOT

START, END = "<!-- results -->", "<!-- /results -->"

# Of the peers the first six are known. (nDCG@1 is P@1.)
FIGURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "nDCG@3", "nDCG@5")


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def when(entry: dict[str, Any]) -> str:
    machine = entry["machine"]
    vectors = f" with {machine['vectors']}" if "vectors" in machine else ""
    return f"{entry['date']}, {machine['cores']} cores of {machine['cpu']}{vectors}"


def quality() -> list[str]:
    lines = []
    reported = load("peers")
    assert reported is not None
    runs, ensembles = (
        [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}_*.json"))]
        for kind in ("quality", "ensemble")
    )
    for data_set, peers in reported["results"].items():
        ours = [run for run in runs if run["settings"]["corpus.name"] == data_set]
        together = [run for run in ensembles if run["settings"]["corpus.name"] == data_set]
        if not ours:
            continue
        lines += [
            f"**{data_set}**",
            "",
            "| | " + " | ".join(FIGURES) + " | time | memory |",
            "|" + "---|" * (3 + len(FIGURES)),
        ]
        lines += [
            f"| {name} | " + " | ".join(f"{v:.2f}" for v in values) + " |" * (3 + len(FIGURES) - len(values))
            for name, values in peers.items()
        ]
        lines += [row for run in ours for row in quality_rows(run)]
        lines += [row for run in together for row in ensemble_rows(run)]
        commands = [(command(run), run) for run in ours] + [(ensemble_command(run), run) for run in together]
        lines += [
            "",
            *(f"- `{typed}` ({when(run)}). {run.get('note', '')}".rstrip() for typed, run in commands),
            "",
        ]
    return lines


def quality_rows(run: dict[str, Any]) -> list[str]:
    """A row for a run, or one for each of its variants. Time is of all stages, memory of the largest process."""
    settings, results = run["settings"], run["results"]
    name = f"{settings['system']}{described(settings)}"
    # A command that only counts together what an earlier, killed one had trained has seen no training's memory.
    memory = f"{max(results['peak_gb'].values()):.1f} GB" if results["peak_gb"] else ""
    if "variants" not in results:
        return [quality_row(f"**{name}**", results["metrics"], f"{duration(results['seconds'])} | {memory}")]
    each = results.get("variant_seconds", {})
    lines = []
    for variant, found in results["variants"].items():
        # Where stages were not counted for each variant, the time is that of all.
        time = duration(each[variant]) if each else '"' if lines else duration(results["seconds"])
        lines.append(quality_row(f"**{name}, {variant}**", found, f"{time} | {memory}"))
    return lines


def duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 300 else f"{seconds:.0f} s"


def quality_row(title: str, found: dict[str, float], costs: str) -> str:
    return f"| {title} | " + " | ".join(f"{found[key]:.2f}" for key in FIGURES) + f" | {costs} |"


def ensemble_rows(run: dict[str, Any]) -> list[str]:
    """A row for each member, which was trained with documents held out, and one for all together."""
    results = run["results"]
    rows = [quality_row(f"member `{member}`", found, " | ") for member, found in results["members"].items()]
    title = f"**ensemble of these {len(rows)}, {run['settings']['how']}**"
    return [*rows, quality_row(title, results["metrics"], " | ")]


def ensemble_command(run: dict[str, Any]) -> str:
    settings = run["settings"]
    words = [settings["name"], settings["how"], "DIR", *settings["members"]]
    return f"python -m benchmarks.ensemble {shlex.join(words)}"


def described(settings: dict[str, Any]) -> str:
    """What a network was trained with: what reads the text, how much of it, length of training."""
    if "train.epochs" not in settings:
        return ""
    if settings["system"] == "attention_xml":
        reader = f"BiLSTM, {settings['words.max_words']} words"
    elif settings.get("reads") == "words":
        reader = f"word vectors, {settings['words.max_words']} words"
    else:
        reader = f"{settings['encoder.name']}, {settings['encoder.max_tokens']} tokens"
    length = f"{settings['train.epochs']} epoch(s)"
    if settings.get("train.updates"):
        length = f"{settings['train.updates']} updates of {settings['train.batch_size']}"
    return f", {reader}, {length}"


def command(run: dict[str, Any]) -> str:
    settings = run["settings"]
    words = [settings["preset"], "corpus.path=DIR", *settings["overrides"]]
    return f"python -m benchmarks.quality {shlex.join(words)}"


def figures(name: str, title: str, command: str = "") -> list[str]:
    """A benchmark's results as they are: one row a figure. `command`: what is typed, if not the results' name."""
    entry = load(name)
    if entry is None:
        return []
    lines = [
        f"**{title}** (`python -m benchmarks.{command or name}`, {when(entry)})",
        "",
        "| | |",
        "|---|---|",
    ]
    for key, value in entry["results"].items():
        for inner, figure in value.items() if isinstance(value, dict) else [("", value)]:
            if not isinstance(figure, dict | list):
                label = f"{key}: {inner}" if inner else key
                lines.append(f"| {label.replace('_', ' ')} | {figure} |")
    return [*lines, "", *([entry["note"], ""] if "note" in entry else [])]


def beside(name: str, title: str, keys: tuple[str, ...]) -> list[str]:
    """Programs beside one another: a row for each on each data set, and what ours is over the better of the others."""
    entry = load(name)
    if entry is None:
        return []
    lines = [f"**{title}** (`python -m benchmarks.{name}`, {when(entry)})", ""]
    lines += [
        "| | | " + " | ".join(key.replace("_", " ") for key in keys) + " |",
        "|" + "---|" * (2 + len(keys)),
    ]
    for data_set, programs in entry["results"].items():
        for program, found in programs.items():
            if program != "over_better_peer":
                lines.append(
                    f"| {data_set} | {program} | "
                    + " | ".join(
                        f"{found[key]:.3g}" if key[0] != "P" else f"{found[key]:.2f}" for key in keys
                    )
                    + " |"
                )
    lines.append("")
    for data_set, programs in entry["results"].items():
        over = programs["over_better_peer"]
        ratios = ", ".join(
            f"{key.replace('_', ' ')} {value}" for key, value in over.items() if "ratio" in key
        )
        lines.append(
            f"- {data_set}: P@1 {over['P@1_difference']:+} ± {over['known_to']} to the better peer; {ratios}."
        )
    return [*lines, ""]


def growth(name: str, title: str, data: str, columns: dict[str, str], ratio: tuple[str, str]) -> list[str]:
    """A benchmark at several sizes: a row for each. `columns`: heading → figures by name; `ratio`: the heading and the
    name of what is compared between each row and the one before."""
    entry = load(name)
    if entry is None:
        return []
    results = entry["results"]
    lines = [
        f"**{title}** ({data}; `python -m benchmarks.{name}`, {when(entry)})",
        "",
        "| " + " | ".join(columns) + f" | {ratio[0]}, from the row before |",
        "|" + "---|" * (len(columns) + 1),
    ]
    for size, grown in zip(results["sizes"], ["", *results[ratio[1]]], strict=True):
        lines.append("| " + " | ".join(c.format(**size) for c in columns.values()) + f" | {grown} |")
    return [*lines, ""]


def tables() -> str:
    lines = quality()
    lines += figures("label_layer", "The label layer on top of the encoder: LightXML, MiniLM, 32 × 64 tokens")
    lines += figures(
        "clustering", "Balanced clustering of the labels of debian-deps beside libpecos' hierarchical k-means"
    )
    lines += growth(
        "label_space_growth",
        "Label features and full tree as labels grow",
        "generated with the densities of Amazon-670K",
        {
            "labels": "{labels:,}",
            "documents": "{documents:,}",
            "features": "{features_seconds:.2f} s",
            "tree": "{tree_seconds:.2f} s",
            "peak memory": "{peak_gb:.2f} GB",
        },
        ("time over L log L", "seconds_over_l_log_l"),
    )
    lines += beside(
        "linear",
        "`linear` beside libpecos' XR-Linear and napkinXC's PLT on the same TF-IDF",
        ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "train_seconds", "predict_ms", "peak_gb", "growth_gb"),
    )
    lines += growth(
        "linear_growth",
        "The linear ranker as labels grow",
        "the same generated data",
        {
            "labels": "{labels:,}",
            "documents": "{documents:,}",
            "training": "{seconds:.1f} s",
            "longest of 16 blocks": "{longest_block_seconds:.2f} s",
            "peak memory": "{peak_gb:.2f} GB",
            "of it data": "{data_gb:.2f} GB",
            "scoring a document": "{score_ms:.3f} ms",
        },
        ("time over labels", "seconds_over_labels"),
    )
    lines += figures(
        "x_transformer",
        "X-Transformer beside libpecos' XR-Transformer on debian-tags: MiniLM, 64 tokens, 1,500 updates of 32 in all",
        "x_transformer 27112 1500",
    )
    lines += figures(
        "attention_level", "AttentionXML: a level's step as its labels grow at 40 × 8 candidates"
    )
    lines += figures(
        "attention_trees",
        "AttentionXML: trees at once and one after another, bundled sample",
        "attention_level trees",
    )
    lines += figures("aplc_layer", "APLC over a flat layer of 670,000 labels, beside the paper's equation 14")
    lines += figures("treader_layer", "TReaderXML's step over the encoder's own")
    lines += figures("neighbours", "TReaderXML's neighbours")
    lines += figures(
        "corpus_tfidf", "Corpus build and TF-IDF on debian-deps beside scikit-learn in one process"
    )
    lines += figures("metrics", "Metrics of 150,000 documents × top-100 of 670,091 labels")
    return "\n".join(lines).strip()


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    made = f"{before}{START}\n{tables()}\n{END}{after}"
    if "--check" in sys.argv:
        raise SystemExit(0 if made == text else "README.md is not what `make readme` would write")
    path.write_text(made)


if __name__ == "__main__":
    main()
