#include "findings.h"

#include "python_value.h"

namespace tessera::python {

nb::list findings_to_python(const std::vector<formats::Finding>& findings,
                            std::string (*remedy_text)(const Remedy&)) {
  nb::list list;
  for (const formats::Finding& finding : findings) {
    const bool is_error = finding.severity == formats::Finding::Severity::error;
    list.append(nb::make_tuple(
        is_error ? "error" : "note", text_to_python(finding.rule), path_or_none(finding.where.path),
        text_or_none(finding.where.fqn), byte_range_or_none(finding.where.byte_range),
        text_to_python(finding.expected), text_to_python(finding.found),
        text_to_python(finding_to_error(finding).line_with(remedy_text(finding.remedy)))));
  }
  return list;
}

}  // namespace tessera::python
