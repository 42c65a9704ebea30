"""The identity cache: which functions share an entry, and how long an entry lives."""

import functools
import gc
import weakref

import pytest

from jdist._src.core.identity_cache import IdentityCache

pytestmark = pytest.mark.usefixtures("frozen_heap")


class Model:
    def __init__(self, scale=1):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Model)

    __hash__ = None  # equal and not hashable: only identity distinguishes instances

    def step(self, x):
        return x * self.scale

    def other(self, x):
        return x

    __call__ = step


class Slotted:
    __slots__ = ()

    def __call__(self):
        return 1


def function():
    return 1


def _get(cache, fn):
    """Returns the value of `fn` in the cache, a new object on the first call."""
    return cache.get(fn, lambda ref: [ref])


MODEL, SLOTTED, PARTIAL = Model(), Slotted(), functools.partial(function)
SAME = {
    "function": lambda: function,
    "bound_method": lambda: MODEL.step,
    "method_of_class": lambda: Model.step,
    "callable_object": lambda: MODEL,
    "builtin": lambda: len,
    "partial": lambda: PARTIAL,
    "object_that_takes_no_weak_reference": lambda: SLOTTED,
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_same_function_has_the_same_value(make):
    cache = IdentityCache()
    first = _get(cache, make())
    gc.collect()
    assert _get(cache, make()) is first
    assert len(cache) == 1
    assert first[0]() == make()


DIFFERENT = {
    "two_lambdas_of_the_same_source": lambda: [(lambda x: x) for _ in range(2)],
    "methods_of_equal_objects": lambda: [Model().step, Model().step],
    "methods_of_one_object": lambda: [MODEL.step, MODEL.other],
    "equal_callable_objects": lambda: [Model(), Model()],
    "method_and_its_object": lambda: [MODEL, MODEL.step],
    "partials_of_one_function": lambda: [functools.partial(function), functools.partial(function)],
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_different_functions_have_different_values(make):
    cache, (first, second) = IdentityCache(), make()
    assert _get(cache, first) is not _get(cache, second)
    assert len(cache) == 2


COLLECTED = {
    "function": lambda: lambda x: x,
    "partial": lambda: functools.partial(function),
    "callable_object": Model,
}


@pytest.mark.parametrize("make", COLLECTED.values(), ids=COLLECTED)
def test_entry_is_removed_with_its_function(make):
    cache, fn = IdentityCache(), make()
    value = _get(cache, fn)
    assert (len(cache), value[0]()) == (1, fn)
    del fn
    gc.collect()
    assert len(cache) == 0
    assert value[0]() is None


def test_entry_of_a_method_lives_as_long_as_its_object():
    cache, model = IdentityCache(), Model()
    value = weakref.ref(cache.get(model.step, lambda _: Model()))
    gc.collect()
    assert len(cache) == 1  # the method object of the call above is collected, the model is not
    del model
    gc.collect()
    assert len(cache) == 0
    assert value() is None


def test_failed_make_adds_no_entry():
    cache = IdentityCache()
    with pytest.raises(ZeroDivisionError):
        cache.get(function, lambda _: 1 / 0)
    assert len(cache) == 0


def test_cache_may_be_collected_before_its_functions():
    fn = lambda: 1
    _get(IdentityCache(), fn)
    gc.collect()
    assert fn() == 1
