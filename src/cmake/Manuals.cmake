# Manuals and completion scripts of the tools, as the tools write them.
set(share ${PROJECT_BINARY_DIR}/share)
foreach(tool ckpt-inspect ckpt-reshard)
  add_custom_command(OUTPUT ${share}/${tool}.1 ${share}/${tool} ${share}/_${tool} ${share}/${tool}.fish
                     COMMAND ${CMAKE_COMMAND} -E make_directory ${share}
                     COMMAND ${tool} --man > ${share}/${tool}.1
                     COMMAND ${tool} --completion bash > ${share}/${tool}
                     COMMAND ${tool} --completion zsh > ${share}/_${tool}
                     COMMAND ${tool} --completion fish > ${share}/${tool}.fish
                     DEPENDS ${tool} VERBATIM)
  list(APPEND manuals ${share}/${tool}.1)
  list(APPEND bash_completions ${share}/${tool})
  list(APPEND zsh_completions ${share}/_${tool})
  list(APPEND fish_completions ${share}/${tool}.fish)
endforeach()
add_custom_target(tessera_manuals ALL
                  DEPENDS ${manuals} ${bash_completions} ${zsh_completions} ${fish_completions})

# install_manuals(man_folder data_folder [arguments of install(FILES)...])
function(install_manuals man_folder data_folder)
  install(FILES ${manuals} DESTINATION ${man_folder}/man1 ${ARGN})
  install(FILES ${bash_completions} DESTINATION ${data_folder}/bash-completion/completions ${ARGN})
  install(FILES ${zsh_completions} DESTINATION ${data_folder}/zsh/site-functions ${ARGN})
  install(FILES ${fish_completions} DESTINATION ${data_folder}/fish/vendor_completions.d ${ARGN})
endfunction()
