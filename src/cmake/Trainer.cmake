# tessera_add_trainer(name [REUSE_FROM trainer] source...)
# Makes an executable from the sources, linked with tessera::runtime. They are compiled with torch/torch.h as a
# precompiled header: to read it takes longer than all the rest. REUSE_FROM takes that of another trainer in the same
# project, which must have the same compile options; else it costs each trainer most of a minute, once, and 0.8 GB.
function(tessera_add_trainer name)
  cmake_parse_arguments(PARSE_ARGV 1 trainer "" REUSE_FROM "")
  add_executable(${name} ${trainer_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE tessera::runtime)
  if(trainer_REUSE_FROM)
    target_precompile_headers(${name} REUSE_FROM ${trainer_REUSE_FROM})
  else()
    target_precompile_headers(${name} PRIVATE <torch/torch.h>)
  endif()
endfunction()
