# cuvil_absl: abseil as built by scripts/build_abseil.sh, found at CUVIL_ABSL_PREFIX or made on the spot and cached.

if(CUVIL_ABSL_PREFIX)
  set(CUVIL_ABSL_ROOT ${CUVIL_ABSL_PREFIX})
else()
  # Address and undefined-behaviour builds may use the plain archive; only TSan must see every synchronisation.
  set(arguments "")
  if(CUVIL_SANITIZE STREQUAL "thread")
    set(arguments --sanitize=thread)
  endif()
  execute_process(
    COMMAND ${PROJECT_SOURCE_DIR}/scripts/build_abseil.sh ${arguments}
    OUTPUT_VARIABLE CUVIL_ABSL_ROOT
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "scripts/build_abseil.sh failed; set CUVIL_ABSL_PREFIX to use a prefix of your own")
  endif()
  unset(arguments)
endif()
if(NOT EXISTS ${CUVIL_ABSL_ROOT}/lib/libcuvil_absl.a)
  message(FATAL_ERROR "CUVIL_ABSL_PREFIX=${CUVIL_ABSL_ROOT} holds no lib/libcuvil_absl.a")
endif()
message(STATUS "abseil: ${CUVIL_ABSL_ROOT}")

find_package(Threads REQUIRED)
add_library(cuvil_absl STATIC IMPORTED GLOBAL)
set_target_properties(
  cuvil_absl
  PROPERTIES IMPORTED_LOCATION ${CUVIL_ABSL_ROOT}/lib/libcuvil_absl.a
             INTERFACE_INCLUDE_DIRECTORIES ${CUVIL_ABSL_ROOT}/include
             INTERFACE_LINK_LIBRARIES Threads::Threads)
