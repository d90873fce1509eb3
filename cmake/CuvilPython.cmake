# The Python that the extension is built for. -DPython_EXECUTABLE=... chooses it.

find_package(Python 3.11...<3.14 REQUIRED COMPONENTS Interpreter Development.Module)
message(STATUS "Python: ${Python_VERSION} at ${Python_EXECUTABLE}")

# cuvil_uses_cpython_internals(<target> <source> ...)
#
# Lets these files of a target include <internal/pycore_*.h>. Py_BUILD_CORE changes what Python.h declares, so only the
# files that need it get it; the headers are C, so they are included inside extern "C" and with a few macros undefined
# first (HAVE_STD_ATOMIC always, _PyGC_FINALIZED from 3.12 on, _PyObject_LookupSpecial on 3.12).
function(cuvil_uses_cpython_internals target)
  foreach(directory ${Python_INCLUDE_DIRS})
    target_include_directories(${target} SYSTEM PRIVATE ${directory}/internal)
  endforeach()
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS Py_BUILD_CORE=1 Py_BUILD_CORE_MODULE=1)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -Wno-pedantic -Wno-unused-parameter
                                              $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-declarations>)
endfunction()
