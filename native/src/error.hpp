#pragma once

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <string>

#include "flashattn_hopper.h"

namespace fah {

// What a function of the C interface returns, and the text of fah_last_error.
struct Error : std::exception {
  Error(fah_status status, std::string message) : status(status), message(std::move(message)) {}
  const char* what() const noexcept override { return message.c_str(); }

  fah_status status;
  std::string message;
};

// A text as printf makes it.
__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
  va_list values, again;
  va_start(values, format);
  va_copy(again, values);
  std::string made(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, values)), '\0');
  std::vsnprintf(made.data(), made.size() + 1, format, again);
  va_end(again);
  va_end(values);
  return made;
}

inline void require(bool ok, const std::string& message) {
  if (!ok) throw Error(FAH_INVALID_ARGUMENT, message);
}

}  // namespace fah
