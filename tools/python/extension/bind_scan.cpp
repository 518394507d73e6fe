#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind_jobs.h"
#include "inspect/pickle_scan/pickle_scan.h"
#include "object_store/files.h"
#include "python_value.h"
#include "watched_work.h"

namespace tessera::python {
namespace {

nb::list places_to_python(const std::vector<inspect::ScannedPlace>& places) {
  nb::list list;
  for (const inspect::ScannedPlace& place : places) {
    list.append(nb::make_tuple(path_or_none(place.path), text_or_none(place.member), place.offset));
  }
  return list;
}

nb::list names_to_python(const std::vector<inspect::ScannedName>& names) {
  nb::list list;
  for (const inspect::ScannedName& name : names) {
    list.append(nb::make_tuple(std::string(to_string(name.verdict)).c_str(),
                               text_to_python(name.in_words()), text_or_none(name.reason),
                               name.is_called, name.num_times, places_to_python(name.places)));
  }
  return list;
}

nb::list problems_to_python(const std::vector<inspect::ScanProblem>& problems) {
  nb::list list;
  for (const inspect::ScanProblem& problem : problems) {
    const nb::object offset = problem.offset ? nb::cast(*problem.offset) : nb::none();
    list.append(nb::make_tuple(std::string(to_string(problem.kind)).c_str(),
                               path_or_none(problem.path), text_or_none(problem.member), offset,
                               text_to_python(problem.expected), text_to_python(problem.found)));
  }
  return list;
}

nb::tuple scan(const std::vector<nb::bytes>& paths) {
  const std::vector<std::string> wanted = strings_of(paths);
  inspect::PickleScanReport report;
  run_interruptibly([&] {
    for (const std::string& path : wanted) object_store::forget(path);
    report = inspect::scan_pickles(object_store::files(), wanted);
  });
  return nb::make_tuple(names_to_python(report.names), problems_to_python(report.problems),
                        report.num_files, report.num_pickles);
}

}  // namespace

void bind_scan(nb::module_& module) {
  module.def("scan", &scan, nb::arg("paths"));
}

}  // namespace tessera::python
