from treadle_payloads.holds import Holds

KEY = "a" * 64


def test_an_object_goes_with_the_last_who_needs_it() -> None:
    holds = Holds()
    for member in range(16):
        holds.pin(KEY, f"e{member}", until=100.0)
        holds.confirm(KEY, f"e{member}")

    freed = [holds.release(KEY, f"e{member}", now=1.0) for member in range(16)]

    assert freed == [False] * 15 + [True]


def test_a_pin_of_another_attempt_keeps_it_until_the_pin_ends() -> None:
    holds = Holds()
    holds.confirm(KEY, "e1")
    holds.pin(KEY, "e2", until=10.0)

    assert not holds.release(KEY, "e1", now=9.0)
    assert holds.is_pinned(KEY, now=9.0)
    assert not holds.is_pinned(KEY, now=10.0)
    assert holds.release(KEY, "e1", now=10.0)


def test_a_confirmed_hold_does_not_end_by_itself() -> None:
    holds = Holds()
    holds.pin(KEY, "e1", until=10.0)
    holds.confirm(KEY, "e1")
    holds.pin(KEY, "e1", until=11.0)

    assert not holds.release(KEY, "e2", now=1e9)
    assert not holds.is_pinned(KEY, now=1e9)
    assert holds.release(KEY, "e1", now=1e9)


def test_who_is_unknown_frees_what_nobody_holds() -> None:
    assert Holds().release(KEY, "e1", now=0.0)
