// What cuda_host.py needs to call a kernel: an entry point that takes an array of argument addresses, and the kernel's
// parameter types as text. Included by cuda_host.h.
#pragma once
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <typeinfo>
#include <utility>

namespace cuda_host {

template <class... A, size_t... I>
CUDA_HOST_UNCHECKED void call_with(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A>*>(args[I])...);
}
template <class... A> CUDA_HOST_UNCHECKED void call(void (*kernel)(A...), void** args) {
    call_with(kernel, args, std::index_sequence_for<A...>{});
}

// Writes "<pointer: 1 or 0> <bytes of it or of what it points to> <type>" and a line feed; gives the end.
template <class A> char* describe(char* text, char* end) {
    using P = std::remove_cv_t<std::remove_pointer_t<A>>;
    size_t bytes = 1;
    if constexpr (!std::is_void_v<P>) bytes = sizeof(P);
    char* name = abi::__cxa_demangle(typeid(P).name(), nullptr, nullptr, nullptr);
    text += std::snprintf(text, size_t(end - text), "%d %zu %s\n", int(std::is_pointer_v<A>), bytes, name);
    std::free(name);
    return text < end ? text : end;
}
template <class... A> const char* signature(void (*)(A...)) {  // a parameter a line
    static char text[128 * (sizeof...(A) + 1)];
    char* end = text;
    ((end = describe<A>(end, text + sizeof text)), ...);
    return text;
}

}  // namespace cuda_host

#define CUDA_HOST_KERNEL(INDEX, ...)                                             \
    extern "C" CUDA_HOST_UNCHECKED void cuda_host_invoke_##INDEX(void** args) {  \
        cuda_host::call(__VA_ARGS__, args);                                      \
    }                                                                            \
    extern "C" CUDA_HOST_UNCHECKED const char* cuda_host_signature_##INDEX() {   \
        return cuda_host::signature(__VA_ARGS__);                                \
    }
