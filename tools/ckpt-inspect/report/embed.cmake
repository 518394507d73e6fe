# Puts style.css and page.js into page.html, and that into a C++ source, cut where the data goes.
# cmake -D SOURCE_DIR=... -D OUTPUT=... -P embed.cmake
file(READ ${SOURCE_DIR}/page.html page)
foreach(file style.css page.js)
  file(READ ${SOURCE_DIR}/${file} content)
  string(REPLACE "{{${file}}}" "${content}" page "${page}")
endforeach()
string(FIND "${page}" "{{data}}" begin)
string(LENGTH "{{data}}" length)
math(EXPR end "${begin} + ${length}")
string(SUBSTRING "${page}" 0 ${begin} before)
string(SUBSTRING "${page}" ${end} -1 after)
file(WRITE ${OUTPUT} "#include \"ckpt-inspect/report/page.h\"

namespace tessera::cli {

const std::string_view kReportPageBeforeData = R\"__page(${before})__page\";
const std::string_view kReportPageAfterData = R\"__page(${after})__page\";

}  // namespace tessera::cli
")
