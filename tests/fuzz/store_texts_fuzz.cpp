#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "object_store/bucket_listing.h"
#include "object_store/credentials.h"
#include "object_store/s3_server.h"
#include "object_store/url.h"
#include "tessera/base/error.h"

namespace {

using namespace tessera;

void read_list(std::string_view text) {
  for (const object_store::Entry& entry :
       object_store::parse_bucket_page(text, "runs/", "s3://bucket/runs").entries) {
    if (!object_store::is_entry_name(entry.name)) std::abort();  // could lead out of the folder
  }
}

void read_error(std::string_view text) {
  object_store::HttpResponse response{.status = 403, .headers = {}};
  response.error_body = text;
  for (const int status : {301, 400, 403, 404, 500}) {
    response.status = status;
    static_cast<void>(
        object_store::s3_error("s3://bucket/key", response, {}, "us-east-1", "to read"));
  }
}

void read_url(const std::string& text) {
  if (object_store::form_decode(object_store::percent_encode(text)) != text) std::abort();
  static_cast<void>(object_store::form_decode(text));
  if (object_store::is_url(text)) static_cast<void>(object_store::parse_url(text));
}

}  // namespace

/// Texts that the object store parses: the first byte chooses a bucket's list, an error, a profile
/// file or a URL.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  if (nbytes == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, nbytes - 1);
  try {
    switch (data[0]) {
      case 'l':
        read_list(text);
        break;
      case 'e':
        read_error(text);
        break;
      case 'p':
        static_cast<void>(object_store::parse_profile_file(text));
        break;
      default:
        read_url(std::string(text));
    }
  } catch (const tessera::Error&) {
  }
  return 0;
}
