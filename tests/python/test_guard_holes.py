"""What dict tags, type tags and watchers do not notice: every hole in the guards' mechanisms, a test under its name."""

from __future__ import annotations

import abc
import collections
import gc
import types
import weakref

import pytest
import torch
import torch.nn as nn
from eager_twin import Fn, eager_twin, ramp, warm


class Plain:
    """An object with an instance dict."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Scaled:
    k = 2.0

    def scale(self):
        return self.k


class Negated(Scaled):
    def scale(self):
        return -self.k


# ------------------------------------------------------------------ instance dicts
@eager_twin(served=True)
def test_hole_inline_attribute_store_after_the_plan():
    """Attributes kept inline in the object do not move the tag of a dict that was only read (3.13.0)."""
    helper = Plain(k=1.0)
    m = Fn(lambda s, x: x * helper.k)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        helper.k = 2.0
        yield from warm("two", m, ramp(3))
        setattr(helper, "k", 3.0)
        yield "three", m(ramp(3))
        object.__setattr__(helper, "k", 4.0)
        yield "four", m(ramp(3))


@eager_twin(served=True)
def test_hole_inline_attribute_store_from_a_hot_site():
    class Slotless:
        def __init__(self):
            self.k = 1.0
            self.j = 0.0

    def hot(o, value, n):
        for _ in range(n):
            o.k = value

    helper = Slotless()
    hot(Slotless(), 0.0, 3000)
    m = Fn(lambda s, x: x * helper.k + helper.j)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        hot(helper, 2.0, 1)
        yield from warm("two", m, ramp(3))
        hot(helper, 3.0, 3000)
        yield "three", m(ramp(3))
        vars(helper)
        hot(helper, 4.0, 1)
        yield "four", m(ramp(3))


@eager_twin(served=True)
def test_hole_inline_attribute_added_and_deleted():
    helper = Plain(k=1.0)
    m = Fn(lambda s, x: x * getattr(helper, "extra", helper.k))
    with torch.no_grad():
        yield from warm("absent", m, ramp(3))
        helper.extra = 5.0
        yield from warm("present", m, ramp(3))
        del helper.extra
        yield "absent-again", m(ramp(3))
        vars(helper).update(extra=7.0)
        yield "through-vars", m(ramp(3))


@eager_twin(served=True)
def test_hole_object_class_assigned():
    helper = Scaled()
    m = Fn(lambda s, x: x * helper.scale())
    with torch.no_grad():
        yield from warm("scaled", m, ramp(3))
        helper.__class__ = Negated
        yield from warm("negated", m, ramp(3))
        helper.__class__ = Scaled
        yield "scaled-again", m(ramp(3))


@eager_twin(served=True)
def test_hole_module_class_assigned():
    class A(nn.Module):
        def forward(self, x):
            return x + 1

    class B(A):
        def forward(self, x):
            return x - 1

    inner = A()
    m = nn.Sequential(inner, nn.Identity())
    with torch.no_grad():
        yield from warm("a", m, ramp(3))
        inner.__class__ = B
        yield from warm("b", m, ramp(3))
        inner.__class__ = A
        yield "a-again", m(ramp(3))


@eager_twin(served=True)
def test_hole_object_dict_assigned():
    helper = Plain(k=1.0)
    m = Fn(lambda s, x: x * helper.k)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        helper.__dict__ = {"k": 2.0}
        yield from warm("two", m, ramp(3))
        kept = helper.__dict__
        helper.__dict__ = {"k": 3.0}
        kept["k"] = 99.0
        yield "three", m(ramp(3))


@eager_twin(served=True)
def test_hole_module_dict_assigned():
    m = Fn(lambda s, x: x * s.k, k=2.0)
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        m.__dict__ = dict(m.__dict__, k=5.0)
        yield from warm("five", m, ramp(3))


@eager_twin(served=True)
def test_hole_function_dict_assigned():
    def helper():
        return helper.k

    helper.k = 2.0
    m = Fn(lambda s, x: x * helper.k)
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        helper.k = 3.0
        yield "three", m(ramp(3))
        helper.__dict__ = {"k": 4.0}
        yield "four", m(ramp(3))


@eager_twin(served=True)
def test_hole_freed_dict_address_comes_back():
    """A dict freed and another allocated at its address, with a tag that fits by chance, is another dict."""
    m = Fn(lambda s, x: x * s.table["k"] + s.helper.k, table={"k": 1.0}, helper=Plain(k=1.0))
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        for i in range(20):
            m.table = None
            m.helper = None
            gc.collect(0)
            m.table = {"k": float(i)}
            m.helper = Plain(k=float(-i))
            yield f"{i}", m(ramp(3))


# ------------------------------------------------------------------ containers
@eager_twin(served=True)
def test_hole_ordered_dict_move_to_end():
    table = collections.OrderedDict(a=1.0, b=2.0)

    def forward(s, x):
        for value in table.values():
            x = x * 2 + value
        return x

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("ab", m, ramp(3))
        table.move_to_end("a")
        yield from warm("ba", m, ramp(3))
        table.move_to_end("a", last=False)
        yield "ab", m(ramp(3))


@eager_twin(served=True)
def test_hole_list_contents():
    table = [1.0, 2.0]
    m = Fn(lambda s, x: x * table[0] + sum(table) + len(table))
    with torch.no_grad():
        yield from warm("a", m, ramp(3))
        table[0] = 5.0
        yield "item", m(ramp(3))
        table.append(1.0)
        yield "append", m(ramp(3))
        table.reverse()
        yield "reverse", m(ramp(3))
        table.sort()
        yield "sort", m(ramp(3))
        table[:] = [3.0]
        yield "slice", m(ramp(3))
        table *= 2
        yield "imul", m(ramp(3))


@eager_twin(served=True)
def test_hole_set_contents():
    table = {1, 2}
    m = Fn(lambda s, x: x * len(table) if 2 in table else x - len(table))
    with torch.no_grad():
        yield from warm("a", m, ramp(3))
        table.discard(2)
        table.add(3)
        yield "same-size", m(ramp(3))
        table.clear()
        yield "empty", m(ramp(3))
        table |= {2, 5, 7}
        yield "update", m(ramp(3))


@eager_twin(served=True)
def test_hole_cell_contents():
    k = 1.0

    def forward(s, x):
        return x * k

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        k = 2.0
        yield from warm("two", m, ramp(3))
        forward.__closure__[0].cell_contents = 3.0
        yield "three", m(ramp(3))


@eager_twin(served=True)
def test_hole_slots():
    class Slotted:
        __slots__ = ("k",)

    helper = Slotted()
    helper.k = 1.0
    m = Fn(lambda s, x: x * helper.k if hasattr(helper, "k") else x)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        helper.k = 2.0
        yield from warm("two", m, ramp(3))
        del helper.k
        yield "unset", m(ramp(3))


@eager_twin(served=True)
def test_hole_kwdefaults_in_place():
    def helper(x, *, k=2.0):
        return x * k

    m = Fn(lambda s, x: helper(x))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        helper.__kwdefaults__["k"] = 3.0
        yield from warm("three", m, ramp(3))
        helper.__kwdefaults__ = {"k": 4.0}
        yield "four", m(ramp(3))


@eager_twin(served=True)
def test_hole_forward_kwdefaults_in_place():
    class M(nn.Module):
        def forward(self, x, *, k=2.0):
            return x * k

    m = M()
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        M.forward.__kwdefaults__["k"] = 3.0
        yield from warm("three", m, ramp(3))


@eager_twin
def test_hole_defaultdict_factory():
    table = collections.defaultdict(lambda: 1.0)
    m = Fn(lambda s, x: x * table["missing"])
    with torch.no_grad():
        for i in range(6):
            table.pop("missing", None)
            yield f"one{i}", m(ramp(3))
        table.pop("missing", None)
        table.default_factory = lambda: 2.0
        yield "two", m(ramp(3))
        table.default_factory = None
        yield "kept", m(ramp(3))


# ------------------------------------------------------------------ classes and functions
@eager_twin(served=True)
def test_hole_class_attribute_changed_in_place():
    class Config:
        table = [1.0]
        names = {"k": 2.0}

    m = Fn(lambda s, x: x * Config.table[0] + Config.names["k"])
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        Config.table[0] = 2.0
        yield "list", m(ramp(3))
        Config.names["k"] = 3.0
        yield "dict", m(ramp(3))


@eager_twin(served=True)
def test_hole_method_code_assigned():
    class Helper:
        def scale(self, x):
            return x * 2

    helper = Helper()
    m = Fn(lambda s, x: helper.scale(x))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        Helper.scale.__code__ = (lambda self, x: x * 3).__code__
        yield from warm("three", m, ramp(3))


@eager_twin(served=True)
def test_hole_forward_code_assigned():
    class M(nn.Module):
        def forward(self, x):
            return x * 2

    m = M()
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        M.forward.__code__ = (lambda self, x: x * 3).__code__
        yield from warm("three", m, ramp(3))


@eager_twin(served=True)
def test_hole_function_code_and_defaults_assigned():
    def helper(x, k=2.0):
        return x * k

    m = Fn(lambda s, x: helper(x))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        helper.__defaults__ = (3.0,)
        yield from warm("three", m, ramp(3))
        helper.__code__ = (lambda x, k=0.0: x - k).__code__
        yield from warm("minus", m, ramp(3))


@eager_twin
def test_hole_module_call_code_assigned():
    """The interception survives `Module.__call__.__code__ = ...`; the new code has to run."""
    m = Fn(lambda s, x: x + 1)
    call = nn.Module.__call__
    code = call.__code__
    with torch.no_grad():
        yield from warm("plain", m, ramp(3))
        call.__code__ = (lambda self, *args, **kwargs: self._call_impl(*args, **kwargs) * 10).__code__
        try:
            yield "patched", m(ramp(3))
        finally:
            call.__code__ = code
        yield "restored", m(ramp(3))


@eager_twin(served=True)
def test_hole_metaclass_attribute():
    class Meta(type):
        k = 1.0

    class Config(metaclass=Meta):
        pass

    m = Fn(lambda s, x: x * Config.k)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        Meta.k = 2.0
        yield from warm("two", m, ramp(3))
        Config.k = 3.0
        yield "three", m(ramp(3))
        Meta.k = property(lambda cls: 4.0)
        yield "data-descriptor-wins", m(ramp(3))


@eager_twin
def test_hole_abc_register():
    class Marker(abc.ABC):  # noqa: B024 - nothing abstract is needed
        pass

    class Thing:
        pass

    thing = Thing()
    m = Fn(lambda s, x: x * 2 if isinstance(thing, Marker) else x)
    with torch.no_grad():
        yield from warm("no", m, ramp(3))
        Marker.register(Thing)
        yield from warm("yes", m, ramp(3))


@eager_twin
def test_hole_abc_register_of_a_standard_class():
    class Mine:
        pass

    thing = Mine()
    m = Fn(lambda s, x: x * 2 if isinstance(thing, collections.abc.Mapping) else x)
    with torch.no_grad():
        yield from warm("no", m, ramp(3))
        collections.abc.Mapping.register(Mine)
        yield from warm("yes", m, ramp(3))


@eager_twin
def test_hole_subclass_hook_and_instance_check():
    class Meta(type):
        answer = False

        def __instancecheck__(cls, obj):
            return cls.answer

    class Odd(metaclass=Meta):
        pass

    m = Fn(lambda s, x: x * 2 if isinstance(3, Odd) else x)
    with torch.no_grad():
        yield from warm("no", m, ramp(3))
        Meta.answer = True
        yield from warm("yes", m, ramp(3))
        Meta.__instancecheck__ = lambda cls, obj: False
        yield "patched", m(ramp(3))


@pytest.mark.parametrize("changes", [500, 4000])
def test_hole_type_tag_exhausted(changes):
    """A class modified so often that it has no version tag any more."""
    from eager_twin import compare_with_eager

    def program():
        class Config:
            k = 1.0

        m = Fn(lambda s, x: x * Config.k)
        for i in range(changes):
            Config.k = float(i)
            if i % 10 == 0:
                Config.k  # noqa: B018 - reading assigns a tag
                Config().k  # noqa: B018
        with torch.no_grad():
            yield from warm("warm", m, ramp(3))
            for i in range(5):
                Config.k = float(i)
                yield f"{i}", m(ramp(3))

    compare_with_eager(program)


@eager_twin(served=True)
def test_hole_second_change_of_a_class():
    """A type watcher fires once until a tag is assigned again."""

    class Config:
        k = 1.0

    m = Fn(lambda s, x: x * Config.k)
    with torch.no_grad():
        for i in range(8):
            Config.k = float(i)
            yield f"first{i}", m(ramp(3))
            Config.k = float(-i)
            yield from warm(f"second{i}", m, ramp(3))


@eager_twin(served=True)
def test_hole_base_class_changes():
    class Base:
        k = 1.0

    class Derived(Base):
        pass

    class Other:
        k = 7.0

    helper = Derived()
    m = Fn(lambda s, x: x * helper.k)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        Base.k = 2.0
        yield from warm("base", m, ramp(3))
        Derived.__bases__ = (Other,)
        yield "bases", m(ramp(3))
        Derived.k = 9.0
        yield "own", m(ramp(3))


@eager_twin(served=True)
def test_hole_getattr_and_getattribute_added():
    class Helper:
        pass

    helper = Helper()
    m = Fn(lambda s, x: x * getattr(helper, "k", 1.0))
    with torch.no_grad():
        yield from warm("absent", m, ramp(3))
        Helper.__getattr__ = lambda self, name: 5.0
        yield from warm("getattr", m, ramp(3))
        Helper.__getattribute__ = lambda self, name: 6.0
        yield "getattribute", m(ramp(3))
        del Helper.__getattribute__, Helper.__getattr__
        yield "gone", m(ramp(3))


@eager_twin(served=True)
def test_hole_descriptor_object_changed():
    class Descriptor:
        def __init__(self):
            self.k = 1.0

        def __get__(self, obj, owner):
            return self.k

    descriptor = Descriptor()

    class Helper:
        value = descriptor

    helper = Helper()
    m = Fn(lambda s, x: x * helper.value)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        descriptor.k = 2.0
        yield from warm("two", m, ramp(3))
        Descriptor.__get__ = lambda self, obj, owner: 3.0
        yield "three", m(ramp(3))
        Descriptor.__set__ = lambda self, obj, value: None
        helper.__dict__["value"] = 8.0
        yield "data-descriptor", m(ramp(3))
        del Descriptor.__set__
        yield "instance-wins", m(ramp(3))


@eager_twin(served=True)
def test_hole_module_attribute_and_module_getattr():
    config = types.ModuleType("cuvil_test_config")
    config.k = 1.0
    m = Fn(lambda s, x: x * config.k)
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        config.k = 2.0
        yield from warm("two", m, ramp(3))
        del config.k
        config.__getattr__ = lambda name: 3.0
        yield from warm("three", m, ramp(3))
        config.__getattr__ = lambda name: 4.0
        yield "four", m(ramp(3))

        class Live(types.ModuleType):
            @property
            def k(self):
                return 5.0

        config.__class__ = Live
        yield "five", m(ramp(3))


@eager_twin(served=True)
def test_hole_global_from_a_hot_store():
    namespace: dict = {"k": 0.0}
    exec("def hot(v, n):\n global k\n for _ in range(n): k = v\ndef forward(s, x):\n return x * k\n", namespace)
    m = Fn(namespace["forward"])
    with torch.no_grad():
        namespace["hot"](1.0, 3000)
        yield from warm("one", m, ramp(3))
        namespace["hot"](2.0, 1)
        yield from warm("two", m, ramp(3))
        exec("k = 3.0", namespace)
        yield "exec", m(ramp(3))
        del namespace["k"]
        namespace["__builtins__"] = dict(vars(__import__("builtins")), k=4.0)
        yield "builtins-of-old-function", _attempt_name(m)


def _attempt_name(m):
    try:
        return m(ramp(3))
    except NameError as e:
        return str(e)


@eager_twin(served=True)
def test_hole_builtin_shadowed():
    namespace: dict = {}
    exec("def forward(s, x):\n return x * len([1, 2])\n", namespace)
    m = Fn(namespace["forward"])
    import builtins

    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        namespace["len"] = lambda o: 5.0
        yield "global-shadows", m(ramp(3))
        del namespace["len"]
        yield "gone", m(ramp(3))
        original = builtins.len
        builtins.len = lambda o: 7.0
        try:
            y = m(ramp(3))
        finally:
            builtins.len = original
        yield "builtin-replaced", y


@eager_twin
def test_hole_weak_reference_dies():
    class Owner:
        k = 3.0

    owner = Owner()
    ref = weakref.ref(owner)
    m = Fn(lambda s, x: x * ref().k if ref() is not None else x)
    with torch.no_grad():
        yield from warm("alive", m, ramp(3))
        del owner
        gc.collect()
        yield from warm("dead", m, ramp(3))


@eager_twin(served=True)
def test_hole_same_address_other_float():
    """A float freed and another allocated at its address: guards hold what they compare."""
    m = Fn(lambda s, x: x * s.k, k=float("1.5"))
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        for i in range(30):
            m.k = None
            m.k = float(i) + 0.25
            yield f"{i}", m(ramp(3))


@eager_twin(served=True)
def test_hole_same_address_other_list_and_function():
    def make(i):
        return lambda x: x * i

    m = Fn(lambda s, x: s.f(x) + s.table[0], f=make(1.0), table=[1.0])
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        for i in range(30):
            m.f = m.table = None
            m.f, m.table = make(float(i)), [float(-i)]
            yield f"{i}", m(ramp(3))
