"""Memoised rules, keyed by what they read: nobody lists by hand which fields an answer depends on.

A rule is a function of a frozen object, such as a Layout, and of further hashable arguments. It runs on a stand-in that
notes every field and property read. The answer then serves all objects with equal values of these. A rule that reads
another field is keyed by that field from then on.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
Answer = TypeVar("Answer")
Record = TypeVar("Record")
MISSING: Any = object()
"""Answer of a key that has none yet."""
PRIVATE = ("_subject", "_changed")


class Recorded:
    """Stand-in for an object, or for another stand-in. Its `__dict__` holds what was read.

    A property counts as one reading: a rule that reads `dp` is keyed by it, not by its factors. Methods run on the
    stand-in. `dataclasses.replace` reads every field, `with_fields` none.
    """

    __hash__ = None  # type: ignore[assignment]  # a key of another memo would hide what its rule reads

    def __eq__(self, other: object) -> bool:
        raise TypeError("a rule compares fields, not whole objects: its key would have them all")

    def __getattr__(self, name: str) -> Any:
        """Read a name for the first time. Later reads find it in `__dict__`."""
        if name.startswith("_"):
            raise AttributeError(name)
        declared = getattr(self.__class__, name, None)
        derive = declared.fget if isinstance(declared, property) else getattr(declared, "func", None)
        # A property of a changed field is derived anew, from fields that are noted.
        reading = derive(self) if derive and self._changed else getattr(self._subject, name)
        self.__dict__[name] = reading
        return reading


@cache
def _stand_in(kind: type[Any]) -> type[Recorded]:
    """Return a stand-in that passes for a kind of dataclass, for isinstance and `replace`. It has its methods."""
    methods = {
        name: method
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and not name.startswith("__")
    }
    fields = {"__dataclass_fields__": kind.__dataclass_fields__, "__class__": property(lambda _: kind)}
    return type(f"Recorded{kind.__name__}", (Recorded,), {**methods, **fields})


def with_fields(subject: Record, **changes: object) -> Record:
    """Return an object with other fields. Of a stand-in, the others are noted only when they are read."""
    if not isinstance(subject, Recorded):
        return replace(subject, **changes)  # type: ignore[type-var]  # any dataclass
    kind: Any = subject.__class__
    stand_in = object.__new__(_stand_in(kind))
    stand_in.__dict__.update(changes, _subject=subject, _changed=True)
    return cast(Record, stand_in)


class Memo(Generic[Answer]):
    """Answers of a rule. `most`: number of answers above which all are dropped. 0 = unlimited."""

    def __init__(self, rule: Callable[..., Answer], most: int = 0) -> None:
        self._rule, self._most = rule, most
        self._names: tuple[str, ...] = ()
        self._read: Callable[[Any], tuple[Any, ...]] = lambda _: ()
        self._answers: dict[Hashable, Answer] = {}

    def __call__(self, subject: Any, *arguments: Hashable) -> Answer:
        """Return the answer for an object, and note what it depends on if that is a stand-in."""
        key = self._read(subject), arguments
        answer: Answer = self._answers.get(key, MISSING)
        return self._work_out(subject, *key) if answer is MISSING else answer

    def _work_out(self, subject: Any, readings: tuple[Any, ...], arguments: tuple[Hashable, ...]) -> Answer:
        names, stand_in = self._names, object.__new__(_stand_in(subject.__class__))
        notes = stand_in.__dict__
        notes.update(zip(names, readings, strict=False), _subject=subject, _changed=False)
        answer = self._rule(stand_in, *arguments)
        notes["_subject"] = None  # a stand-in that outlives its rule would be read unnoticed
        # A rule that calls itself may have widened the key before.
        if len(notes) > len(names) + len(PRIVATE) or self._names is not names:
            self._names += tuple(name for name in notes if name not in PRIVATE and name not in self._names)
            # Of a single name attrgetter gives no tuple.
            self._read = attrgetter(*self._names, *self._names[: len(self._names) == 1])
            # Keys widen within the first few answers, so looking for these on every miss costs more than it saves.
            self._answers.clear()
            readings = self._read(subject)
        elif self._most and len(self._answers) >= self._most:
            self._answers.clear()
        self._answers[readings, arguments] = answer
        return answer


class recorded(Generic[P, Answer]):  # a decorator
    """Method of an object and a Layout whose answers are memoised per instance."""

    def __init__(self, rule: Callable[Concatenate[Any, P], Answer], most: int = 0) -> None:
        self._rule, self._most = rule, most

    def __set_name__(self, owner: type, name: str) -> None:
        """Note the name of the attribute."""
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[P, Answer]:
        """Return the memo of an instance, which hides this descriptor from then on."""
        memo = instance.__dict__[self._name] = Memo(MethodType(self._rule, instance), self._most)
        return cast(Callable[P, Answer], memo)
