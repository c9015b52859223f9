"""Draw docs/images/pipeline.svg: what a pipeline of 4 ranks with 2 stages each sends, with and without the cache.

    python -m tools.draw_pipeline

The boxes come from a plan, so the picture shows what the code does. It is written as text, the same on every machine.
"""

from __future__ import annotations

from tools.import_graph import ROOT

PICTURE = ROOT / "docs" / "images" / "pipeline.svg"
RANKS, VIRTUAL, BLOCK = 4, 2, 2  # one block of two sublayers a stage
STEP, BOX, LEFT, TOP = 92, 15, 96, 54  # pixels
COLOURS = ("#555555", "#4477aa", "#228833", "#997700", "#cc3311", "#aa3377", "#006688", "#774499")


def draw() -> str:
    import depthmix as dm
    from depthmix.parallel import make_plan

    depth = RANKS * VIRTUAL * BLOCK
    stack = dm.DepthStack("block_attnres", dim=4, depth=depth, block_sublayers=BLOCK)
    plan = make_plan(stack, shape=(1, 1), ranks=RANKS, virtual=VIRTUAL)
    width, panel = LEFT + STEP * plan.count + 10, TOP + BOX * plan.count + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {2 * panel}" font-family="sans-serif">',
        f'<rect width="{width}" height="{2 * panel}" fill="#ffffff"/>',
    ]
    for k, cache in enumerate((False, True)):
        top, hops = k * panel, plan.hops(cache)
        words = "with the cache" if cache else "without a cache"
        lines.append(text(10, top + 20, f"{words}: {plan.sent_tensors(cache)} tensors per micro-batch", 15, "bold"))
        lines.append(text(10, top + TOP + BOX * plan.count // 2, "sent to the", 12))
        lines.append(text(10, top + TOP + BOX * plan.count // 2 + 15, "next stage", 12))
        for s in range(plan.count):
            x = LEFT + s * STEP
            lines.append(f'<rect x="{x}" y="{top + 28}" width="{STEP - 34}" height="20" rx="3" fill="#eef1f4"/>')
            lines.append(text(x + 4, top + 42, f"rank {plan.rank_of[s]}", 12))
            if s == plan.count - 1:
                continue
            lines.append(text(x + STEP - 30, top + 43, "→", 16))
            for row, n in enumerate(plan.states[s + 1]):
                y, colour = top + TOP + row * BOX, COLOURS[row % len(COLOURS)]
                sent = n in hops[s]
                style = f'fill="{colour}"' if sent else f'fill="none" stroke="{colour}" stroke-dasharray="2 2"'
                name = "embedding" if row == 0 else f"block {row}"
                lines.append(
                    f'<rect x="{x + 30}" y="{y}" width="54" height="{BOX - 3}" {style}>'
                    f"<title>{name}: {'sent' if sent else 'the next rank has it'}</title></rect>"
                )
                fill = "#ffffff" if sent else colour
                lines.append(text(x + 57, y + 10, "emb" if row == 0 else f"b{row}", 9, fill=fill, anchor="middle"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def text(
    x: int, y: int, words: str, size: int, weight: str = "normal", fill: str = "#222", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}">'
        f"{words}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE.relative_to(ROOT))
