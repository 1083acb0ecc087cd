"""Tables of what pytorch_collectives.py and model_inference.py measured."""

from report.blocks import TABLES, draw, footer, machine_line, size_name

SPEED = "{images_per_second:,.1f} ({latency_ms[p50]:.1f}, {latency_ms[p95]:.1f})"


def collectives_table(found: dict) -> str:
    """A row for each collective: latency and bandwidth."""
    rows = []
    for name, one in found["operations"].items():
        largest = one["rows"][-1]
        rows.append(one | {"name": name, "bus": largest["bus"]})
    about = f"{found['backend']}, {found['ranks']} ranks, messages up to "
    about += size_name(largest["bytes"])
    machine = machine_line(found["hardware"], found["backend"] == "gloo")
    return draw(rows, TABLES["collectives"]) + footer(found, "collectives", machine, rows, about)


def inference_table(found: dict) -> str:
    """images/s per batch size, and in brackets p50 and p95 of a call in ms."""
    rows = {}
    sizes = {}
    for row in found["rows"]:
        size = f"batch {row['batch_size']}"
        memory = row["peak_memory_gib"]
        about = row | {"memory": memory["device"] or memory["process"]}
        first = rows.setdefault((row["runtime"], row["precision"]), about)
        first[size] = SPEED.format_map(row["host_to_host"])
        sizes[size] = f"{{{size}}}"
    columns = {"runtime": "{runtime}", "precision": "{precision}"} | sizes
    columns |= {"memory GiB": "{memory:.2f}", "first call s": "{first_call_s:.2f}"}
    return draw(rows.values(), columns)
