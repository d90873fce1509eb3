# cuvil_llvm: static LLVM with exactly the components that jit/ uses. Only cuvil_jit links it, privately.

if(NOT CUVIL_LLVM_DIR)
  set(CUVIL_LLVM_DIR /usr/lib/llvm-${CUVIL_LLVM_VERSION}/lib/cmake/llvm)
endif()
# No version is asked for: LLVM's own check refuses 22.1 for a request of 22.
find_package(LLVM REQUIRED CONFIG PATHS ${CUVIL_LLVM_DIR} NO_DEFAULT_PATH)
if(LLVM_PACKAGE_VERSION VERSION_LESS 19)
  message(FATAL_ERROR "LLVM ${LLVM_PACKAGE_VERSION} at ${LLVM_DIR}: 19 or later is needed")
endif()
message(STATUS "LLVM: ${LLVM_PACKAGE_VERSION} at ${LLVM_DIR}")

# LLVM's package names the shared zstd and zlib. Static ones keep them out of the extension's NEEDED entries.
foreach(pair zstd::libzstd_shared=zstd ZLIB::ZLIB=z)
  string(REPLACE "=" ";" pair ${pair})
  list(GET pair 0 target)
  list(GET pair 1 library)
  if(TARGET ${target})
    find_library(CUVIL_STATIC_${library} NAMES lib${library}.a REQUIRED)
    mark_as_advanced(CUVIL_STATIC_${library})
    set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${CUVIL_STATIC_${library}}
                                               IMPORTED_LOCATION_RELEASE ${CUVIL_STATIC_${library}})
  endif()
endforeach()

llvm_map_components_to_libnames(
  llvm_libraries
  orcjit
  native)
add_library(cuvil_llvm INTERFACE)
target_link_libraries(cuvil_llvm INTERFACE ${llvm_libraries})
target_include_directories(cuvil_llvm SYSTEM INTERFACE ${LLVM_INCLUDE_DIRS})
separate_arguments(llvm_definitions NATIVE_COMMAND "${LLVM_DEFINITIONS}")
target_compile_definitions(cuvil_llvm INTERFACE ${llvm_definitions})
if(NOT LLVM_ENABLE_RTTI)
  target_compile_options(cuvil_llvm INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-rtti>)
endif()
unset(llvm_libraries)
unset(llvm_definitions)
