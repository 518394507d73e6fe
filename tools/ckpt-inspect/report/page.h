#pragma once

#include <string_view>

namespace tessera::cli {

/// The report without its data: page.html with style.css and page.js in it. Generated
/// (embed.cmake).
extern const std::string_view kReportPageBeforeData;
extern const std::string_view kReportPageAfterData;

}  // namespace tessera::cli
