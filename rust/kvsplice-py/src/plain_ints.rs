//! Reads plain ints out of a list or tuple through the C API. The bindings' only `unsafe` is here.
//!
//! `numpy.array(list)` takes some 20 ns for each item and would be most of the time of a match; this takes a
//! quarter of that.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyList, PyTuple};

/// Appends the items from `tokens.len()` on, up to the first that is not of type `int` itself or does not fit.
pub(crate) fn from_list(list: &Bound<'_, PyList>, tokens: &mut Vec<u32>) {
    // Keeps other threads from changing the list, where there is no GIL to do so.
    with_critical_section(list, || {
        // SAFETY: `list` is a list.
        let items = (tokens.len()..list.len()).map(|n| unsafe { ffi::PyList_GetItem(list.as_ptr(), n.cast_signed()) });
        read(list.py(), items, tokens);
    });
}

/// As [`from_list`], for a tuple.
pub(crate) fn from_tuple(tuple: &Bound<'_, PyTuple>, tokens: &mut Vec<u32>) {
    // SAFETY: `tuple` is a tuple.
    let items = (tokens.len()..tuple.len()).map(|n| unsafe { ffi::PyTuple_GetItem(tuple.as_ptr(), n.cast_signed()) });
    read(tuple.py(), items, tokens);
}

/// `items` are borrowed references. They stay valid here: nothing below runs Python code, so nobody changes
/// the container between an item's lookup and its conversion.
fn read(py: Python<'_>, items: impl Iterator<Item = *mut ffi::PyObject>, tokens: &mut Vec<u32>) {
    for item in items {
        if item.is_null() {
            break;
        }
        // SAFETY: a borrowed reference, valid as said above.
        let kind = unsafe { ffi::Py_TYPE(item) };
        if kind != &raw mut ffi::PyLong_Type {
            return;
        }
        // SAFETY: as above. An exact int: no `__index__` is called.
        let value = unsafe { ffi::PyLong_AsLongLong(item) };
        let Ok(token) = u32::try_from(value) else {
            break;
        };
        tokens.push(token);
    }
    // An int out of range, and only that, may have left an exception.
    drop(PyErr::take(py));
}
