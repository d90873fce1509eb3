# cuvil_flags: how our own code is compiled. cuvil_link_flags: how executables and the extension are linked.
# Both are targets, so that nothing leaks into third-party code through global flags.

set(allowed "" address thread undefined)
if(NOT CUVIL_SANITIZE IN_LIST allowed)
  message(FATAL_ERROR "CUVIL_SANITIZE=${CUVIL_SANITIZE}: expected address, thread or undefined")
endif()
unset(allowed)

add_library(cuvil_flags INTERFACE)
target_compile_features(cuvil_flags INTERFACE cxx_std_20)
target_compile_options(
  cuvil_flags
  INTERFACE -ffunction-sections
            -fdata-sections
            -Wall
            -Wextra
            $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
            # CPython's method tables leave trailing members out on purpose.
            -Wno-missing-field-initializers
            $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>
            # False alarms for std::string's operator+ (GCC bug 105651).
            $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
            $<$<BOOL:${CUVIL_WERROR}>:-Werror>)

add_library(cuvil_link_flags INTERFACE)
target_link_options(cuvil_link_flags INTERFACE -fuse-ld=lld -Wl,--gc-sections -Wl,--as-needed)

if(CUVIL_SANITIZE)
  target_compile_options(cuvil_flags INTERFACE -fsanitize=${CUVIL_SANITIZE} -fno-omit-frame-pointer -g1
                                               $<$<STREQUAL:${CUVIL_SANITIZE},undefined>:-fno-sanitize-recover=all>)
  target_link_options(cuvil_link_flags INTERFACE -fsanitize=${CUVIL_SANITIZE})
endif()
