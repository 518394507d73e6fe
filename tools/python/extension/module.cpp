#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "base/size_text.h"
#include "bind_jobs.h"
#include "bind_reader.h"
#include "errors.h"
#include "python_value.h"
#include "tessera/base/parallel.h"
#include "tessera/reshard/executor.h"

// The extension under the package's Python code (src/tessera); src/tessera/_core.pyi has its types.
// Python passes paths as bytes, and gets findings and summaries as tuples and dicts. Its code turns
// these into the classes that users see.
NB_MODULE(_core, module) {
  module.attr("__version__") = TESSERA_VERSION;
  module.attr("__interface__") = TESSERA_INTERFACE;
  module.attr("DEFAULT_MEMORY_NBYTES") = tessera::kDefaultMemoryNbytes;
  module.attr("DEFAULT_EXTRA_FILES_NBYTES") = tessera::reshard::kDefaultExtraFilesNbytes;
  module.def("default_num_threads", &tessera::default_num_threads);
  module.def(
      "parse_size",
      [](const nanobind::bytes& text) {
        return tessera::parse_size(tessera::python::string_of(text));
      },
      nanobind::arg("text"));
  tessera::python::translate_errors();
  tessera::python::bind_reader(module);
  tessera::python::bind_verify(module);
  tessera::python::bind_scan(module);
  tessera::python::bind_move(module);
  tessera::python::bind_job(module);
}
