"""Which of CPython's test modules run under full instrumentation, and which differences are expected and why."""

from __future__ import annotations

import importlib.util

# Language, built-in types, standard library in Python, and what looks at frames, code and tracebacks.
MODULES = """
test_abc test_array test_asyncgen test_augassign test_base64 test_bdb test_bigmem test_binop test_bisect test_bool
test_bufio test_builtin test_bytes test_call test_class test_cmath test_code test_codeop test_collections test_compare
test_compile test_complex test_contains test_context test_contextlib test_contextlib_async test_copy test_copyreg
test_coroutines test_csv test_dataclasses test_decimal test_decorators test_defaultdict test_deque test_descr
test_descrtut test_dict test_dictcomps test_dictviews test_dynamicclassattribute test_enum test_enumerate
test_except_star test_exception_group test_exception_hierarchy test_exception_variations test_exceptions test_extcall
test_float test_fnmatch test_format test_fractions test_frame test_fstring test_funcattrs test_functools test_gc
test_generator_stop test_generators test_genericclass test_genericpath test_genexps test_getopt test_global test_glob
test_hash test_heapq test_inspect test_int test_isinstance test_iter test_iterlen test_itertools test_json
test_keywordonlyarg test_list test_listcomps test_locale test_logging test_long test_memoryview test_metaclass
test_named_expressions test_numeric_tower test_opcache test_opcodes test_operator test_ordered_dict
test_patma test_pickle test_positional_only_arg test_pow test_pprint test_print test_property test_pyclbr test_queue
test_raise test_random test_range test_re test_reprlib test_richcmp test_scope test_set test_setcomps test_shelve
test_slice test_sort test_statistics test_str test_string test_struct test_subclassinit test_super test_sys_setprofile
test_syntax test_textwrap test_threading_local test_traceback test_tuple test_type_comments test_types test_typing
test_unary test_unicode_identifiers test_unpack test_unpack_ex test_userdict test_userlist test_userstring
test_warnings test_weakref test_weakset test_with test_yield_from test_zipfile
""".split()

# A short list for every change; the whole one is for nightly runs.
SAMPLE = """
test_asyncgen test_builtin test_call test_class test_collections test_compile test_contextlib test_coroutines
test_dataclasses test_descr test_dict test_enum test_except_star test_exceptions test_extcall test_fstring
test_functools test_generators test_genexps test_listcomps test_named_expressions test_patma test_property test_raise
test_scope test_super test_traceback test_types test_unpack_ex test_with test_yield_from
""".split()

# Not in the lists at all: test_sys_settrace's jump tests loop for ever, because their trace function waits for the
# frame whose f_code is the function's own; test_dis compares the bytecode of running frames; test_monitoring counts
# events, which differ under any PEP 523 hook (a hook that only forwards fails 49 of 65 tests on 3.12, 59 of 78 on 3.13,
# most of them because the first failures leave their events set). No trace is taken while a tool is registered.

COPY_IS_VISIBLE = "a running frame's f_code is the instrumented copy, not the function's __code__"
NOT_SPECIALISED = "looks for specialised instructions in code whose copy has run instead of it"

# Each checks that one instruction of a hot function got specialised (3.13).
SPECIALISATION_TESTS = """
test_assign_init_code test_binary_subscr_getitem test_binary_subscr_list_int test_for_iter_gen test_for_iter_list
test_load_attr_class test_load_attr_getattribute_overridden test_load_attr_instance_value
test_load_attr_method_lazy_dict test_load_attr_method_no_dict test_load_attr_method_with_values
test_load_attr_module test_load_attr_property test_load_attr_with_hint test_load_global_module
test_store_attr_instance_value test_store_attr_with_hint test_store_subscr_list_int test_unpack_sequence_list
""".split()

# module -> test name -> reason
EXPECTED: dict[str, dict[str, str]] = {
    "test_code": {"test_co_positions_artificial_instructions": COPY_IS_VISIBLE},
    "test_descr": {"test_slots": COPY_IS_VISIBLE},
    "test_generators": {"syntax": COPY_IS_VISIBLE},
    "test_opcache": dict.fromkeys(SPECIALISATION_TESTS, NOT_SPECIALISED),
}


def expected(module: str) -> dict[str, str]:
    return EXPECTED.get(module, {})


def is_expected(test: str, known: dict[str, str]) -> bool:
    return test in known


def exists(module: str) -> bool:
    return importlib.util.find_spec("test." + module) is not None
