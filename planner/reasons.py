"""Why a plan is what it is, in one sentence for the user."""

from collections.abc import Sequence

from planner.values import Method

_STEPS: dict[Method, str] = {
    "simple": "each pipeline goes on with the nodes that are left of it",
    "borrow": "a pipeline that was left too small borrowed nodes of pipelines that could spare some",
    "merge": "a pipeline that was left too small was merged with another, as none could spare a node",
}


def reason_of(
    method: Method, sizes: Sequence[int], lost: Sequence[str], joined: Sequence[str], idle: Sequence[str]
) -> str:
    """:param sizes: nodes of each pipeline of the plan.
    :param lost, joined: nodes that are gone or new since the previous plan.
    """
    news = [f"{names(lost)} left"] if lost else []
    news += [f"{names(joined)} joined"] if joined else []
    what = f"{pipelines_of(sizes)}; {safety(len(sizes))}"
    match method:
        case "initial":
            sentence = f"the quickest way to use the nodes is {what}"
        case "unchanged":
            sentence = f"the nodes of the pipelines are the same, and so is the plan: {what}"
        case "simple" | "borrow" | "merge":
            sentence = f"{_STEPS[method]}: {what}"
        case "best" if joined or not lost:
            sentence = f"the quickest way to use the nodes is now {what}"
        case "best":
            sentence = f"mending single pipelines would waste nodes or copies; the quickest for all is {what}"
    if idle:
        sentence += f"; {names(idle)} {'is' if len(idle) == 1 else 'are'} idle, as no pipeline can use more"
    return f"{' and '.join(news)}: {sentence}." if news else f"{sentence[0].upper()}{sentence[1:]}."


def names(nodes: Sequence[str]) -> str:
    """At most four of them."""
    if len(nodes) > 4:
        return f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"
    return nodes[0] if len(nodes) == 1 else f"{', '.join(nodes[:-1])} and {nodes[-1]}"


def pipelines_of(sizes: Sequence[int]) -> str:
    """``3 pipelines (2 of 2 nodes, 1 of 3 nodes)``."""
    if len(sizes) == 1:
        return f"1 pipeline of {_nodes(sizes[0])}"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} pipelines of {_nodes(sizes[0])}"
    kinds = ", ".join(f"{sizes.count(size)} of {_nodes(size)}" for size in sorted(set(sizes), reverse=True))
    return f"{len(sizes)} pipelines ({kinds})"


def safety(pipelines: int) -> str:
    if pipelines == 1:
        return "there is one copy of the model, so the next failure may lose state"
    if pipelines == 2:
        return "any 1 node can fail and a copy of every layer is left"
    return f"any {pipelines - 1} nodes can fail and a copy of every layer is left"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
