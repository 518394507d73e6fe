#include "object_store/curl_library.h"

#include <dlfcn.h>

#include <string>

#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

constexpr const char* kLibrary = "libcurl.so.4";

[[noreturn]] void refuse(const std::string& why) {
  throw Error::expected(ErrorKind::unsupported, {}, "URL",
                        std::string(kLibrary) + ", which reads URLs", why,
                        "install libcurl; on Debian and Ubuntu: apt-get install libcurl4");
}

void* open_library() {
  // Also tries libcurl built with GnuTLS, which has another file name and the same interface.
  for (const char* name : {kLibrary, "libcurl-gnutls.so.4"}) {
    if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  refuse("no library that can be loaded");
}

template <class Function>
void find(void* library, const char* name, Function*& function) {
  void* symbol = ::dlsym(library, name);
  if (symbol == nullptr) refuse(std::string("a library without ") + name);
  function = reinterpret_cast<Function*>(symbol);
}

CurlLibrary load() {
  void* library = open_library();
  CurlLibrary curl{};
  find(library, "curl_global_init", curl.global_init);
  find(library, "curl_easy_init", curl.easy_init);
  find(library, "curl_easy_setopt", curl.easy_setopt);
  find(library, "curl_easy_perform", curl.easy_perform);
  find(library, "curl_easy_cleanup", curl.easy_cleanup);
  find(library, "curl_easy_strerror", curl.easy_strerror);
  find(library, "curl_share_init", curl.share_init);
  find(library, "curl_share_setopt", curl.share_setopt);
  find(library, "curl_share_cleanup", curl.share_cleanup);
  find(library, "curl_slist_append", curl.slist_append);
  find(library, "curl_slist_free_all", curl.slist_free_all);
  if (curl.global_init(curl::kGlobalDefault) != curl::kOk) refuse("a library that cannot start");
  return curl;
}

}  // namespace

const CurlLibrary& CurlLibrary::of_process() {
  static const CurlLibrary library = load();
  return library;
}

}  // namespace tessera::object_store
