"""What is remembered of a function, for how long, and under what identity."""

import functools
import gc
import weakref

import pytest

from jdist._src.core.identity_cache import IdentityCache


class Model:
    def __init__(self, scale=1):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Model)

    __hash__ = None  # equal, and in no dict: identity is all there is

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


def _made(cache, fn):
    """What the cache has of `fn`: a new object if it had none."""
    return cache.get(fn, lambda ref: [ref])


MODEL, SLOTTED, PARTIAL = Model(), Slotted(), functools.partial(function)
FOUND = {
    "function": lambda: function,
    "bound_method": lambda: MODEL.step,
    "method_of_class": lambda: Model.step,
    "callable_object": lambda: MODEL,
    "builtin": lambda: len,
    "partial": lambda: PARTIAL,
    "object_that_takes_no_weak_reference": lambda: SLOTTED,
}


@pytest.mark.parametrize("mention", FOUND.values(), ids=FOUND)
def test_cache_asked_for_same_function_finds_it_again(mention):
    cache = IdentityCache()
    first = _made(cache, mention())
    gc.collect()
    assert _made(cache, mention()) is first
    assert len(cache) == 1
    assert first[0]() == mention()


APART = {
    "two_lambdas_written_alike": lambda: [(lambda x: x) for _ in range(2)],
    "methods_of_equal_objects": lambda: [Model().step, Model().step],
    "methods_of_one_object": lambda: [MODEL.step, MODEL.other],
    "equal_callable_objects": lambda: [Model(), Model()],
    "method_and_its_object": lambda: [MODEL, MODEL.step],
    "partials_of_one_function": lambda: [functools.partial(function), functools.partial(function)],
}


@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_cache_asked_for_other_function_makes_another(make):
    cache, (one, other) = IdentityCache(), make()
    assert _made(cache, one) is not _made(cache, other)
    assert len(cache) == 2


FORGOTTEN = {
    "function": lambda: lambda x: x,
    "partial": lambda: functools.partial(function),
    "callable_object": Model,
}


@pytest.mark.parametrize("make", FORGOTTEN.values(), ids=FORGOTTEN)
def test_cache_of_function_that_is_gone_is_empty(make):
    cache, fn = IdentityCache(), make()
    value = _made(cache, fn)
    assert (len(cache), value[0]()) == (1, fn)
    del fn
    gc.collect()
    assert len(cache) == 0
    assert value[0]() is None


def test_cache_of_method_lives_as_long_as_its_object():
    cache, model = IdentityCache(), Model()
    value = weakref.ref(cache.get(model.step, lambda _: Model()))
    gc.collect()
    assert len(cache) == 1  # the method object of the call above is gone, the model is not
    del model
    gc.collect()
    assert len(cache) == 0
    assert value() is None


def test_cache_whose_making_fails_keeps_nothing():
    cache = IdentityCache()
    with pytest.raises(ZeroDivisionError):
        cache.get(function, lambda _: 1 / 0)
    assert len(cache) == 0


def test_cache_that_is_gone_before_its_function_does_no_harm():
    fn = lambda: 1
    _made(IdentityCache(), fn)
    gc.collect()
    assert fn() == 1
