"""The HTML that notebooks show for a checkpoint: the tree of names, and a map of rectangles whose areas show bytes."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint

MAX_CHILDREN = 40  # most children that a node shows; the others share a line
MAX_DEPTH = 8  # of nested boxes in the tree
WIDTH, HEIGHT = 720.0, 160.0  # of the map, in pixels
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")


class Node:
    """A component of names, with the components below it."""

    def __init__(self, name: str):
        self.name = name
        self.nbytes = 0
        self.num_tensors = 0
        self.leaf = ""  # text for the entry of this name, such as dtype and shape; empty if there is none
        self.children: dict[str, Node] = {}

    def add(self, components: list[str], nbytes: int, leaf: str, is_tensor: bool) -> None:
        node = self
        for component in ["", *components]:
            if component:
                node = node.children.setdefault(component, Node(component))
            node.nbytes += nbytes
            node.num_tensors += is_tensor
        node.leaf = leaf

    def by_size(self) -> list[Node]:
        return sorted(self.children.values(), key=lambda child: -child.nbytes)


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def html_of(checkpoint: Checkpoint) -> str:
    root = Node("")
    for name in checkpoint:
        meta = checkpoint._metas.get(name)
        if meta is not None:
            nbytes = math.prod(meta.shape) * meta.itemsize
            root.add(name.split("."), nbytes, f"{meta.dtype} {list(meta.shape)}", True)
        else:
            target = checkpoint.aliases.get(name)
            root.add(name.split("."), 0, "value" if target is None else f"tied to {target}", False)
    title = (f"<b>{html.escape(checkpoint.path)}</b>: {checkpoint.format}, {len(checkpoint._metas)} tensors, "
             f"{len(checkpoint._values)} values, {size_in_words(root.nbytes)}")
    tree = "".join(_tree(child, 1) for child in _shown(root))
    return f'<div style="font-family:monospace">{title}{_map(root)}{tree}</div>'


def size_in_words(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} B"


def _shown(node: Node) -> list[Node]:
    """Returns the children to show. If they are more than MAX_CHILDREN, one node stands for the others."""
    children = list(node.children.values())
    if len(children) <= MAX_CHILDREN:
        return children
    rest = Node(f"and {len(children) - MAX_CHILDREN + 1} more")
    for child in children[MAX_CHILDREN - 1:]:
        rest.nbytes += child.nbytes
        rest.num_tensors += child.num_tensors
    return [*children[:MAX_CHILDREN - 1], rest]


def _tree(node: Node, depth: int) -> str:
    name = html.escape(node.name)
    if not node.children or depth == MAX_DEPTH:
        facts = html.escape(node.leaf) or f"{node.num_tensors} tensors, {size_in_words(node.nbytes)}"
        return f'<div style="margin-left:1.2em">{name} <span style="opacity:.6">{facts}</span></div>'
    inner = "".join(_tree(child, depth + 1) for child in _shown(node))
    if node.leaf:
        inner = f'<div style="margin-left:1.2em;opacity:.6">{html.escape(node.leaf)}</div>' + inner
    return (f'<details style="margin-left:1.2em"><summary>{name} <span style="opacity:.6">{node.num_tensors} tensors, '
            f"{size_in_words(node.nbytes)}</span></summary>{inner}</details>")


def _map(root: Node) -> str:
    """Returns two levels of names as nested rectangles, or an empty text if there are no bytes."""
    if not root.nbytes:
        return ""
    node = root
    while len(only := [child for child in node.children.values() if child.nbytes]) == 1:
        node = only[0]
    boxes = []
    for i, (child, area) in enumerate(_divided(node, Rectangle(0, 0, WIDTH, HEIGHT))):
        boxes.append(_box(area, COLOURS[i % len(COLOURS)], 1, child))
        for grandchild, inner in _divided(child, area):
            boxes.append(_box(inner, "#fff", 0.12, grandchild))
            if inner.y > area.y or inner.x > area.x:  # the first grandchild has the label of the child in its corner
                boxes.append(_label(inner, grandchild))
        boxes.append(_label(area, child))
    return (f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" style="display:block;max-width:{WIDTH:.0f}px;margin:.4em 0">'
            + "".join(boxes) + "</svg>")


def _label(area: Rectangle, node: Node) -> str:
    if area.height < 14 or area.width < 8 * min(len(node.name), 4):
        return ""
    name = html.escape(node.name[:int(area.width / 7)])
    return f'<text x="{area.x + 4:.1f}" y="{area.y + 12:.1f}" font-size="11" fill="#fff">{name}</text>'


def _divided(node: Node, area: Rectangle) -> list[tuple[Node, Rectangle]]:
    """Divides an area among the children by bytes: halves of about equal size, across the longer side."""
    children = [child for child in node.by_size() if child.nbytes][:MAX_CHILDREN]
    found: list[tuple[Node, Rectangle]] = []
    todo = [(children, area)] if children else []
    while todo:
        group, space = todo.pop()
        if len(group) == 1:
            found.append((group[0], space))
            continue
        total = sum(child.nbytes for child in group)
        cut, before = 1, group[0].nbytes
        while cut < len(group) - 1 and before + group[cut].nbytes <= total / 2:
            before += group[cut].nbytes
            cut += 1
        share = before / total
        if space.width >= space.height:
            one = space._replace(width=space.width * share)
            other = space._replace(x=space.x + one.width, width=space.width - one.width)
        else:
            one = space._replace(height=space.height * share)
            other = space._replace(y=space.y + one.height, height=space.height - one.height)
        todo += [(group[:cut], one), (group[cut:], other)]
    return found


def _box(area: Rectangle, colour: str, opacity: float, node: Node) -> str:
    title = f"{html.escape(node.name)}: {size_in_words(node.nbytes)}"
    return (f'<rect x="{area.x:.1f}" y="{area.y:.1f}" width="{area.width:.1f}" height="{area.height:.1f}" fill="{colour}" '
            f'fill-opacity="{opacity}" stroke="#fff"><title>{title}</title></rect>')
