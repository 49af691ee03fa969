"""The demo on a terminal: the text as it comes, then the figures."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text as RichText

from fabric_core.cli.render import Column, number, show_table, size, text_lines
from fabric_kvcache.demo.report import KvDemo, KvFleet, Prefilled, Result, Text

__all__ = ["Screen"]

_TITLES = {"two": "two processes, KV moved", "one": "one process"}
_LAYERS_SHOWN = 4  # of the first and of the last ones


class Screen:
    """What is on the terminal so far."""

    def __init__(self, target: Console) -> None:
        self.target = target
        self._way = ""

    def text(self, event: Text) -> None:
        """Show a piece of text under the title of its way."""
        if event.way != self._way:
            self.end_line()
            self._way = event.way
            self.target.print(RichText(f"\n{_TITLES[event.way]}:", style="bold"))
        self.target.print(RichText(event.text), end="", soft_wrap=True)

    def end_line(self) -> None:
        if self._way:
            self.target.print()
        self._way = ""

    def figures(self, data: KvDemo) -> None:
        """Show the comparison, the transfer and the layers."""
        self.end_line()
        result, sent = data.decoder, data.prefiller
        self.target.print()
        verdict = RichText("EQUAL", style="bold green") if data.equal else RichText("DIFFERENT", style="bold red")
        self.target.print(verdict.append(f"  {_verdict(result)}", style="default"))
        self.target.print()
        self._facts(result, sent)
        self.target.print()
        self._layers(sent)

    def fleet(self, data: KvFleet) -> None:
        """Show what two decoders got from two prefillers, one of which was killed."""
        killed = data.killed
        for which, result in enumerate(data.decoders):
            self.target.print(RichText(f"\ndecoder{which}:", style="bold"))
            self.target.print(RichText(result.text), soft_wrap=True)
            asked = " and then ".join(address.partition("#")[0] for address in result.asked)
            text_lines(self.target, f"  {_verdict(result)}", f"  asked {asked}; {size(result.bytes)} moved")
        self.target.print()
        text_lines(
            self.target,
            f"{killed.name} was killed after {killed.layers} of {killed.of} layers; its request went to the other one",
        )
        verdict = RichText("EQUAL", style="bold green") if data.equal else RichText("DIFFERENT", style="bold red")
        self.target.print(verdict)

    def _facts(self, result: Result, sent: Prefilled) -> None:
        model = result.model
        one = result.one_ttft_us or 0.0
        rows = [
            (
                "model",
                f"{model.name}: {model.layers} layers x {model.kv_heads} KV heads x {model.head_dim}, {model.dtype}",
            ),
            ("prompt", f"{result.prompt_tokens} tokens, {len(result.tokens)} generated"),
            (
                "moved",
                f"{size(result.bytes)} in {result.writes} writes: {result.pages} pages of {size(result.page_bytes)} "
                f"x {model.layers} layers, and the last logits",
            ),
            ("over", f"backend {result.backend}, {result.nics} NIC{'s' if result.nics > 1 else ''}"),
            ("speed", f"{sent.gbyte_s:.2f} GB/s ({sent.gbit_s:.1f} Gbit/s) while a write was under way"),
            (
                "overlap",
                f"{sent.overlap:.0%}: {sent.hidden_us / 1e3:.2f} of {sent.transfer_us / 1e3:.2f} ms of transfer hidden "
                f"under {sent.prefill_us / 1e3:.0f} ms of prefill",
            ),
            (
                "first token",
                f"{result.ttft_us / 1e3:.1f} ms with two processes, {one / 1e3:.1f} ms with one "
                f"({(result.ttft_us - one) / 1e3:+.1f} ms)",
            ),
            (
                "then",
                f"{_per_token(result):.1f} ms a token; pages to the model's own cache: {result.import_us / 1e3:.1f} ms",
            ),
        ]
        text_lines(self.target, *(f"{name:<12} {value}" for name, value in rows))

    def _layers(self, sent: Prefilled) -> None:
        columns = [
            Column("LAYER", right=True),
            Column("COMPUTE(us)", right=True),
            Column("PUSH(us)", right=True),
            Column("TRANSFER(us)", right=True),
            Column("BYTES", right=True),
        ]
        shown = sent.layers
        gap = len(shown) > 2 * _LAYERS_SHOWN + 1
        head, tail = (shown[:_LAYERS_SHOWN], shown[-_LAYERS_SHOWN:]) if gap else (shown, [])
        rows = [
            [str(x.layer), number(x.compute_us, 0), number(x.push_us, 0), number(x.transfer_us, 0), size(x.bytes)]
            for x in head
        ]
        if gap:
            rows.append(["...", "", "", "", ""])
            rows += [
                [str(x.layer), number(x.compute_us, 0), number(x.push_us, 0), number(x.transfer_us, 0), size(x.bytes)]
                for x in tail
            ]
        count = len(shown) or 1
        rows.append(
            [
                "mean",
                number(sum(x.compute_us for x in shown) / count, 0),
                number(sum(x.push_us for x in shown) / count, 0),
                number(sum(x.transfer_us for x in shown) / count, 0),
                size(sum(x.bytes for x in shown) // count),
            ]
        )
        show_table(self.target, columns, rows)


def _verdict(result: Result) -> str:
    def word(equal: bool | None) -> str:
        return "equal" if equal else "DIFFERENT"

    return (
        f"text {word(result.text == result.one_text)}, tokens {word(result.tokens == result.one_tokens)}, "
        f"KV bytes {word(result.kv_equal)}, first logits {word(result.logits_equal)}"
    )


def _per_token(result: Result) -> float:
    return result.decode_us / 1e3 / max(1, len(result.tokens) - 1)
