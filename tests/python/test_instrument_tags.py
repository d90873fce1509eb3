"""Versions of dicts and classes move when, and only when, something changed."""

from __future__ import annotations

import sys
import types

import pytest
from cuvil import _native

dict_tag, type_tag, instance_dict = _native._debug_dict_tag, _native._debug_type_tag, _native._debug_instance_dict


class A:
    def __init__(self):
        self.x = 1
        self.y = 2


class Empty:
    pass


class Slots:
    __slots__ = ("x",)


def store(o, n=1):
    for i in range(n):
        o.x = i + 1000


@pytest.mark.parametrize("warm", [0, 3000])
@pytest.mark.parametrize(
    "change",
    [
        lambda o: store(o),
        lambda o: setattr(o, "x", object()),
        lambda o: object.__setattr__(o, "x", object()),
        lambda o: setattr(o, "new", 1),
        lambda o: delattr(o, "y"),
        lambda o: o.__dict__.__setitem__("x", 7),
        lambda o: o.__dict__.update(x=8),
        lambda o: vars(o).clear(),
    ],
)
def test_a_store_to_an_attribute_moves_the_tag(change, warm):
    for _ in range(warm):
        store(A())
    o = A()
    attributes = instance_dict(o)
    assert attributes is o.__dict__ and list(attributes.items()) == [("x", 1), ("y", 2)]
    before = dict_tag(attributes)
    assert o.x == 1 and dict_tag(attributes) == before
    change(o)
    assert dict_tag(attributes) != before


def test_a_store_at_a_site_hot_for_this_object_moves_the_tag():
    o = A()
    attributes = instance_dict(o)
    store(o, 3000)
    before = dict_tag(attributes)
    store(o)
    assert dict_tag(attributes) != before


def test_the_first_attribute_of_an_empty_object_moves_the_tag():
    o = Empty()
    attributes = instance_dict(o)
    assert attributes == {}
    before = dict_tag(attributes)
    o.x = 1
    assert dict_tag(attributes) != before and o.__dict__ is attributes and attributes == {"x": 1}


def test_detaching_twice_changes_nothing():
    o = A()
    attributes = instance_dict(o)
    before = dict_tag(attributes)
    assert instance_dict(o) is attributes and dict_tag(attributes) == before


def test_objects_without_instance_dict():
    assert instance_dict(Slots()) is None
    assert instance_dict(3) is None
    assert instance_dict(A) is None
    assert instance_dict(object()) is None
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0
        finally:
            instance_dict(3)


def test_dicts_of_modules_and_functions_are_found():
    module = types.ModuleType("m")
    module.x = 1
    assert instance_dict(module) is module.__dict__

    def function():
        pass

    function.x = 1
    assert instance_dict(function) is function.__dict__


def test_the_tag_ignores_watchers_and_moves_with_every_kind_of_write():
    d = {"a": 1, "b": 2}
    tags = [dict_tag(d)]
    for write in (
        lambda: d.__setitem__("a", 5),
        lambda: d.__setitem__("z", 1),
        lambda: d.pop("z"),
        lambda: d.update(b=7),
        lambda: d.setdefault("q", 1),
        lambda: d.popitem(),
        lambda: d.clear(),
    ):
        write()
        tags.append(dict_tag(d))
    assert len(set(tags)) == len(tags)
    before = dict_tag(d)
    d.get("a")
    "a" in d  # noqa: B015
    assert dict_tag(d) == before


def test_the_tag_of_a_class_moves_with_its_attributes_and_bases():
    class B:
        pass

    class D(B):
        pass

    first, derived = type_tag(B), type_tag(D)
    assert first and derived and type_tag(B) == first
    B.attribute = 1
    assert _native._debug_current_type_tag(B) != first
    assert _native._debug_current_type_tag(D) != derived
    assert type_tag(B) not in (0, first)
    assert type_tag(int) and type_tag(type) and type_tag(object)


def test_observers_of_the_thread_are_noticed_and_refused():
    if sys.gettrace() is None:
        assert not _native._debug_observed()
    saved = sys.gettrace()
    sys.settrace(lambda *a: None)
    try:
        assert _native._debug_observed()
        with pytest.raises(RuntimeError, match="trace function"):
            _native._debug_run(0, len, ())
    finally:
        sys.settrace(saved)
    saved = sys.getprofile()
    sys.setprofile(lambda *a: None)
    try:
        assert _native._debug_observed()
    finally:
        sys.setprofile(saved)
    if sys.version_info >= (3, 12):
        sys.monitoring.use_tool_id(3, "test")
        try:
            assert _native._debug_observed()
        finally:
            sys.monitoring.free_tool_id(3)
