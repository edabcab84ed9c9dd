"""The demo's findings as one value: printed as a table, written as JSON, drawn by `picture`.

The demo fails if any of the three bitwise claims does not hold; `is_ok` is where that is decided.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from paramstore.demo.generation import Generation
from paramstore.demo.settings import DemoSettings
from paramstore.demo.trace import StepTrace, total_traffic
from paramstore.demo.traffic import ExpertTiers, Traffic
from paramstore.sizes import format_size


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The findings. first: steps up to the kill; resumed: from the last commit before it to the end; reference: in memory.

    valid_loss: on held-out files, nats a byte. placement: at the end of training. routed_tokens: to each expert since
    the resumed step, by layer.
    """

    settings: DemoSettings
    corpus_bytes: int
    corpus_sha256: str
    first: tuple[StepTrace, ...]
    resumed: tuple[StepTrace, ...]
    reference: tuple[StepTrace, ...]
    losses_bitwise_equal: bool
    weights_bitwise_equal: bool
    resume_exact: bool
    valid_loss: float
    host_budget_bytes: int
    host_peak_bytes: int
    placement: ExpertTiers
    routed_tokens: tuple[tuple[int, ...], ...]
    generation: Generation
    seconds: float

    @property
    def is_ok(self) -> bool:
        return self.losses_bitwise_equal and self.weights_bitwise_equal and self.resume_exact

    @property
    def traffic(self) -> Traffic:
        """Sums what all training steps moved, those before the kill and those after."""
        return total_traffic(self.first) + total_traffic(self.resumed)

    @property
    def committed_traces(self) -> tuple[StepTrace, ...]:
        """One trace for each step that counts: from the first run before the resumed step, from the second one after it."""
        return tuple(trace for trace in self.first if trace.step < self.resumed[0].step) + self.resumed

    def to_dict(self) -> dict[str, Any]:
        """Plain values of the report, for JSON."""
        traffic, shape = self.traffic, self.settings.shape
        return {
            "ok": self.is_ok,
            "losses_bitwise_equal": self.losses_bitwise_equal,
            "weights_bitwise_equal": self.weights_bitwise_equal,
            "resume_exact": self.resume_exact,
            "host_budget_bytes": self.host_budget_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "expert_state_bytes": shape.expert_state_bytes,
            "expert_parameters": shape.expert_parameters,
            "ring_resident_fraction": self.generation.resident_fraction,
            "ring_resident_bytes": self.generation.resident_bytes,
            "ring_leased_bytes": self.generation.leased_bytes,
            "expert_bytes": self.generation.total_bytes,
            "hit_rate": {
                "host": traffic.host_hit_rate, "host_by_prefetch": traffic.prefetch_rate, "nvme": traffic.nvme_rate,
                "optim_host": traffic.optim_hit_rate,
            },
            "bytes_moved": {
                "host_leased": traffic.host_bytes, "nvme_read": traffic.nvme_read_bytes,
                "nvme_written": traffic.nvme_written_bytes,
            },
            "valid_loss": self.valid_loss,
            "generated_text": "\n\n".join(f"[{s.domain}] {s.prompt}{s.continuation}" for s in self.generation.samples),
            "generated": [asdict(sample) for sample in self.generation.samples],
            "corpus_bytes": self.corpus_bytes,
            "corpus_sha256": self.corpus_sha256,
            "seconds": self.seconds,
            "settings": asdict(self.settings),
            "steps": {
                "first": [asdict(trace) for trace in self.first],
                "resumed": [asdict(trace) for trace in self.resumed],
                "reference": [asdict(trace) for trace in self.reference],
            },
            "placement": asdict(self.placement),
            "routed_tokens": self.routed_tokens,
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """Writes the JSON to `path`, whole or not at all."""
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self.to_dict(), indent=1))
        os.replace(temporary, path)

    def table(self) -> Table:
        """Makes the short version for people."""
        traffic, settings, generation = self.traffic, self.settings, self.generation
        steps = self.first + self.resumed
        step_s = sum(trace.seconds for trace in steps) / len(steps)
        table = Table(title="paramstore demo", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        rows = {
            "experts": f"{settings.shape.layers} x {settings.shape.experts}, {settings.shape.expert_parameters / 1e6:.1f} M "
            f"parameters, {format_size(settings.shape.expert_state_bytes)} of training state",
            "host memory": f"{format_size(self.host_peak_bytes)} at most by the kernel's count, of a budget of "
            f"{format_size(self.host_budget_bytes)}",
            "losses as in memory": _verdict(self.losses_bitwise_equal, f"steps 1 to {len(self.reference)}"),
            "weights as in memory": _verdict(self.weights_bitwise_equal, f"all experts after step {len(self.reference)}"),
            "resumed exactly": _verdict(
                self.resume_exact, f"killed after step {settings.kill_step}, resumed at {settings.resume_step}"
            ),
            "loss": f"{self.first[0].loss:.3f} to {self.resumed[-1].loss:.3f} nats a byte; {self.valid_loss:.3f} on held-out files",
            "speed": f"{settings.tokens_per_step / step_s:,.0f} tokens/s, {step_s:.2f} s a step",
            "weights found": f"{traffic.host_hit_rate:.0%} in host memory or on their way "
            f"({traffic.prefetch_rate:.0%} by prefetch), {traffic.nvme_rate:.0%} waited for on NVMe",
            "optimizer found": f"{traffic.optim_hit_rate:.0%} in host memory",
            "moved a step": f"{traffic.nvme_read_bytes / len(steps) / 1e6:,.0f} MB read, "
            f"{traffic.nvme_written_bytes / len(steps) / 1e6:,.0f} MB written",
            "ring memory": f"{generation.resident_fraction:.0%} of the experts' weights resident while generating "
            f"({format_size(generation.resident_bytes)} of {format_size(generation.total_bytes)})",
            "time": f"{self.seconds:.0f} s",
        }
        for name, text in rows.items():
            table.add_row(name, text)
        return table


def _verdict(is_true: bool, what: str) -> str:
    return f"{'bitwise equal' if is_true else '[red]DIFFERENT[/red]'} ({what})"
