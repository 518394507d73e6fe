#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind_jobs.h"
#include "findings.h"
#include "object_store/files.h"
#include "python_value.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/detect.h"
#include "tessera/inspect/verify.h"
#include "tessera/reshard/executor.h"
#include "watched_work.h"

namespace tessera::python {
namespace {

nb::list verify(const nb::bytes& path, const nb::bytes& flat_layout,
                const std::vector<nb::bytes>& as_dict, bool values, std::uint64_t memory_nbytes,
                int num_threads, const nb::object& progress) {
  const std::string source = string_of(path);
  const formats::OpenOptions open_options{.flat_layout_path = string_of(flat_layout),
                                          .as_dict = strings_of(as_dict)};
  inspect::VerifyOptions options;
  if (values) options.numbers = inspect::VerifyOptions::Numbers::must_be_finite;
  inspect::VerifyReport report;
  run_watched(progress, [&](Watch& watch) {
    object_store::forget(source);
    const reshard::SourceFiles files;
    const auto reader = formats::open_checkpoint(files.file_system(), source, open_options);
    formats::require_classes_found(open_options.as_dict, {&reader->contents()}, "as_dict");
    watch.expect(inspect::verify_nbytes(*reader, options));
    options.scan = {
        .num_threads = num_threads > 0 ? num_threads : object_store::default_num_threads(),
        .memory_nbytes = memory_nbytes,
        .stop = watch.token(),
        .progress = watch.sink()};
    report = inspect::verify(*reader, options);
    files.require_unchanged();
  });
  return findings_to_python(report.findings);
}

}  // namespace

void bind_verify(nb::module_& module) {
  module.def("verify", &verify, nb::arg("path"), nb::arg("flat_layout"), nb::arg("as_dict"),
             nb::arg("values"), nb::arg("memory"), nb::arg("threads"), nb::arg("progress").none());
}

}  // namespace tessera::python
