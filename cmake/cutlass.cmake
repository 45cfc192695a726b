# fah_find_cutlass(variable): the folder of CUTLASS's include, tools and examples, or nothing. CUTLASS_DIR, else what
# Python finds without importing it; build/_deps/cutlass is where `make native` installs it, in a folder of its own.
set(fah_cutlass_hint "pip install --no-deps --target build/_deps/cutlass nvidia-cutlass, or -DCUTLASS_DIR")

function(fah_find_cutlass variable)
  set(found ${CUTLASS_DIR})
  if(NOT found)
    set(ask "import importlib.util as u, pathlib\ns = u.find_spec('cutlass_library')\n")
    string(APPEND ask "print(pathlib.Path(s.origin).parent / 'source' if s and s.origin else '')")
    execute_process(
      COMMAND ${CMAKE_COMMAND} -E env PYTHONSAFEPATH=1 PYTHONPATH=${PROJECT_SOURCE_DIR}/build/_deps/cutlass
        ${Python3_EXECUTABLE} -c "${ask}"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()
