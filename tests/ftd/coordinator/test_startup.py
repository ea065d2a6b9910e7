"""The progress of a start, as the cluster's state contains it."""

from ftd.coordinator.public_state import startup_state
from statemachine.cluster.startup import Startup
from statemachine.messages.values import BuildStage, StartupStage

S = StartupStage


def texts(startup: Startup, planning: tuple[int, int] | None = None, expected_nodes: int = 0) -> str:
    found = startup_state(startup, planning, expected_nodes)
    assert found is not None
    return str(found["text"])


def test_nodes_are_counted_up_to_the_expected_number() -> None:
    assert texts(Startup(stage=S.NODES, done=1, total=2), expected_nodes=4) == "1 of 4 nodes are ready"
    assert texts(Startup(stage=S.NODES, done=1, total=2)) == "1 of 2 nodes are ready"
    for found in (None, Startup(stage=S.NODES), Startup(stage=S.NODES, done=4, total=4)):
        assert startup_state(found, None, expected_nodes=0) is None, "nothing is starting"
    assert startup_state(Startup(stage=S.NODES, done=4, total=4), None, expected_nodes=4) is None


def test_every_stage_has_words_and_the_share_rises() -> None:
    course = [
        Startup(stage=S.NODES, done=3, total=4),
        Startup(stage=S.BUILDING, node="node-0"),
        *(Startup(stage=S.BUILDING, node="node-0", doing=doing) for doing in BuildStage),
        *(
            Startup(stage=S.MEASURING, done=done, total=10, node="node-0", doing=BuildStage.MEASURING)
            for done in (0, 2, 10)
        ),
        Startup(stage=S.PLANNING),
        Startup(stage=S.PREPARING, done=3, total=4),
        Startup(stage=S.FORMING, done=1, total=4),
        Startup(stage=S.FIRST_STEP, total=1),
    ]
    found = [state for one in course if (state := startup_state(one, (16, 64), 0)) is not None]
    assert len(found) == len(course)
    shares = [state["share"] for state in found]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 1
    assert {state["stage"] for state in found} == set(S)
    measuring = [state["text"] for state in found if state["stage"] == "measuring"]
    assert measuring == [f"node-0 is measuring layer {layer} of 10" for layer in (1, 3, 10)]
    assert "making plans for 16 of 64 numbers of nodes" in [state["text"] for state in found]


def test_numbers_from_the_network_do_not_leave_the_bar() -> None:
    for done, total in ((-5, 3), (9, 3), (9, -3)):
        state = startup_state(Startup(stage=S.MEASURING, done=done, total=total, node="n"), None, 0)
        assert state is not None and 2 / 7 <= state["share"] <= 3 / 7
