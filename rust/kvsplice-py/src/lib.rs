//! Python bindings of the index: convert, release the GIL, call, convert back.

mod arguments;
mod plain_ints;
mod tokens;

use kvsplice::hash::{Roller, base_for_seed};
use kvsplice::{Config, Error, MAX_CAPACITY, MAX_CHUNK_HASH_BYTES, MAX_CHUNK_SIZE, MAX_STRIKES, OnFull, Options, Simd};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{bytes, number};
use crate::tokens::Tokens;

type Column<'py> = Bound<'py, PyArray1<i64>>;
type Columns<'py> = (Column<'py>, Column<'py>, Column<'py>, Column<'py>, Vec<Bound<'py, PyBytes>>);

// By value, for `map_err`.
#[expect(clippy::needless_pass_by_value)]
fn refused(error: Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pyclass(frozen, module = "kvsplice._core")]
struct Index(kvsplice::Index);

#[pymethods]
impl Index {
    #[new]
    fn new(
        chunk_size: &Bound<'_, PyAny>,
        capacity: &Bound<'_, PyAny>,
        on_full: &Bound<'_, PyAny>,
        dedup_content: bool,
        seed: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let config = Config {
            chunk_size: number("chunk_size", chunk_size, 1, MAX_CHUNK_SIZE)?,
            capacity: number("capacity", capacity, 1, MAX_CAPACITY)?,
            on_full: match on_full.extract::<&str>() {
                Ok("evict") => OnFull::Evict,
                Ok("reject") => OnFull::Reject,
                _ => {
                    let message = format!("on_full must be \"evict\" or \"reject\", not {}", on_full.repr()?);
                    return Err(PyValueError::new_err(message));
                }
            },
            dedup_content,
            seed: seed.map(|seed| number("seed", seed, 0, u64::MAX)).transpose()?,
        };
        kvsplice::Index::new(config).map(Self).map_err(refused)
    }

    fn register(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        chunk_hashes: &Bound<'_, PyAny>,
        start_chunk: &Bound<'_, PyAny>,
        position_offset: &Bound<'_, PyAny>,
        scope: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, bool)> {
        let chunk_hashes = arguments::chunk_hashes(chunk_hashes)?;
        let start_chunk = number("start_chunk", start_chunk, 0, usize::MAX)?;
        let position_offset = number("position_offset", position_offset, 0, i64::MAX as u64)?;
        let scope = bytes("scope", scope)?;
        let tokens = Tokens::from_python(tokens)?;
        let tokens = tokens.as_slice()?;
        let done = py.detach(|| self.0.register(tokens, &chunk_hashes, start_chunk, position_offset, &scope));
        let done = done.map_err(refused)?;
        Ok((done.count, done.first_time_full))
    }

    fn r#match<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        scope: &Bound<'py, PyAny>,
        every_occurrence: bool,
        all_holders: bool,
    ) -> PyResult<Columns<'py>> {
        let scope = bytes("scope", scope)?;
        let tokens = Tokens::from_python(tokens)?;
        let tokens = tokens.as_slice()?;
        let options = Options { every_occurrence, all_holders };
        let hits = py.detach(|| self.0.matches(tokens, &scope, options));
        let column = |value: fn(&kvsplice::Hit) -> i64| PyArray1::from_iter(py, hits.iter().map(value));
        Ok((
            column(|hit| hit.old_start.cast_signed()),
            column(|hit| hit.old_start.cast_signed() + hit.len.cast_signed() as i64),
            column(|hit| hit.cur_start.cast_signed() as i64),
            column(|hit| (hit.cur_start + hit.len).cast_signed() as i64),
            hits.iter().map(|hit| PyBytes::new(py, hit.chunk_hash.as_bytes())).collect(),
        ))
    }

    fn remove(&self, py: Python<'_>, chunk_hashes: &Bound<'_, PyAny>, scope: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (chunk_hashes, scope) = (arguments::chunk_hashes(chunk_hashes)?, bytes("scope", scope)?);
        py.detach(|| self.0.remove(&chunk_hashes, &scope)).map_err(refused)
    }

    fn strike<'py>(
        &self,
        py: Python<'py>,
        chunk_hashes: &Bound<'py, PyAny>,
        threshold: &Bound<'py, PyAny>,
        scope: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (chunk_hashes, scope) = (arguments::chunk_hashes(chunk_hashes)?, bytes("scope", scope)?);
        let threshold = number("threshold", threshold, 1, MAX_STRIKES)?;
        let evicted = py.detach(|| self.0.strike(&chunk_hashes, threshold, &scope)).map_err(refused)?;
        Ok(evicted.into_iter().map(|n| PyBytes::new(py, &chunk_hashes[n])).collect())
    }

    fn confirm(&self, py: Python<'_>, chunk_hashes: &Bound<'_, PyAny>, scope: &Bound<'_, PyAny>) -> PyResult<()> {
        let (chunk_hashes, scope) = (arguments::chunk_hashes(chunk_hashes)?, bytes("scope", scope)?);
        py.detach(|| self.0.confirm(&chunk_hashes, &scope)).map_err(refused)
    }

    fn begin(&self, py: Python<'_>, chunk_hashes: &Bound<'_, PyAny>, scope: &Bound<'_, PyAny>) -> PyResult<()> {
        let (chunk_hashes, scope) = (arguments::chunk_hashes(chunk_hashes)?, bytes("scope", scope)?);
        py.detach(|| self.0.begin(&chunk_hashes, &scope)).map_err(refused)
    }

    fn finish(&self, py: Python<'_>, chunk_hashes: &Bound<'_, PyAny>, scope: &Bound<'_, PyAny>) -> PyResult<()> {
        let (chunk_hashes, scope) = (arguments::chunk_hashes(chunk_hashes)?, bytes("scope", scope)?);
        py.detach(|| self.0.finish(&chunk_hashes, &scope)).map_err(refused)
    }

    fn contains(&self, chunk_hash: &Bound<'_, PyAny>, scope: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (chunk_hash, scope) = (bytes("chunk_hash", chunk_hash)?, bytes("scope", scope)?);
        if !(1..=MAX_CHUNK_HASH_BYTES).contains(&chunk_hash.len()) {
            let message = format!("chunk_hash must have 1 to {MAX_CHUNK_HASH_BYTES} bytes, not {}", chunk_hash.len());
            return Err(PyValueError::new_err(message));
        }
        self.0.contains(&chunk_hash, &scope).map_err(refused)
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.0.stats();
        let dict = PyDict::new(py);
        dict.set_item("entries", stats.entries)?;
        dict.set_item("contents", stats.contents)?;
        dict.set_item("scopes", stats.scopes)?;
        dict.set_item("capacity", stats.capacity)?;
        dict.set_item("token_bytes", stats.token_bytes)?;
        dict.set_item("overhead_bytes", stats.overhead_bytes)?;
        dict.set_item("registered", stats.registered)?;
        dict.set_item("removed", stats.removed)?;
        dict.set_item("struck_out", stats.struck_out)?;
        dict.set_item("evicted", stats.evicted)?;
        dict.set_item("rejected_full", stats.rejected_full)?;
        dict.set_item("rejected_collisions", stats.rejected_collisions)?;
        dict.set_item("table_rebuilds", stats.table_rebuilds)?;
        Ok(dict)
    }

    /// The first broken rule of the data structure, if any. Only with no other thread at work.
    fn check(&self) -> Option<String> {
        self.0.check().err()
    }
}

fn spans(start: &PyReadonlyArray1<'_, i64>, end: &PyReadonlyArray1<'_, i64>) -> Vec<(i64, i64)> {
    start.as_array().iter().copied().zip(end.as_array().iter().copied()).collect()
}

// By value: so does pyo3 hand arguments over.
#[expect(clippy::needless_pass_by_value)]
#[pyfunction]
fn coverage(start: PyReadonlyArray1<'_, i64>, end: PyReadonlyArray1<'_, i64>) -> u64 {
    kvsplice::spans::coverage(spans(&start, &end))
}

#[expect(clippy::needless_pass_by_value)]
#[pyfunction]
fn non_overlapping<'py>(
    py: Python<'py>,
    start: PyReadonlyArray1<'py, i64>,
    end: PyReadonlyArray1<'py, i64>,
    prefix_tokens: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let prefix = number("prefix_tokens", prefix_tokens, 0, i64::MAX)?;
    let kept = kvsplice::spans::non_overlapping(&spans(&start, &end), prefix);
    Ok(PyArray1::from_iter(py, kept.into_iter().map(|n| n.cast_signed() as i64)))
}

fn roller(chunk_size: &Bound<'_, PyAny>, base: &Bound<'_, PyAny>) -> PyResult<Roller> {
    let chunk_size = number("chunk_size", chunk_size, 1, MAX_CHUNK_SIZE)?;
    let base: u64 = number("base", base, 1, u64::MAX)?;
    if base.is_multiple_of(2) {
        return Err(PyValueError::new_err(format!("base must be odd, not {base}")));
    }
    Ok(Roller::new(chunk_size, base))
}

#[pyfunction]
fn rolling_fingerprints<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    chunk_size: &Bound<'py, PyAny>,
    base: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let roller = roller(chunk_size, base)?;
    let tokens = Tokens::from_python(tokens)?;
    let tokens = tokens.as_slice()?;
    Ok(PyArray1::from_vec(py, py.detach(|| roller.rolling(tokens))))
}

#[pyfunction]
fn chunk_fingerprints<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    chunk_size: &Bound<'py, PyAny>,
    base: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let roller = roller(chunk_size, base)?;
    let tokens = Tokens::from_python(tokens)?;
    let tokens = tokens.as_slice()?;
    Ok(PyArray1::from_vec(py, py.detach(|| roller.chunks(tokens))))
}

/// Tokens in any form, as an array that later calls read in place.
#[pyfunction]
fn token_array<'py>(py: Python<'py>, tokens: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<u32>>> {
    Ok(match Tokens::from_python(tokens)? {
        Tokens::Owned(tokens) => PyArray1::from_vec(py, tokens),
        borrowed => PyArray1::from_slice(py, borrowed.as_slice()?),
    })
}

#[pyfunction]
fn chain<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    chunk_size: &Bound<'py, PyAny>,
    parent: Option<&Bound<'py, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let chunk_size = number("chunk_size", chunk_size, 1, MAX_CHUNK_SIZE)?;
    let parent = parent.map(|parent| bytes("parent", parent)).transpose()?;
    let tokens = Tokens::from_python(tokens)?;
    let tokens = tokens.as_slice()?;
    let root = kvsplice::chain::root();
    let hashes = py.detach(|| kvsplice::chain::chunk_hashes(tokens, chunk_size, parent.as_deref().unwrap_or(&root)));
    Ok(hashes.iter().map(|hash| PyBytes::new(py, hash)).collect())
}

/// The instruction set that fingerprints are computed with here.
#[pyfunction]
fn simd() -> &'static str {
    Simd::detect().name()
}

#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::{Index, chain, chunk_fingerprints, coverage, non_overlapping, rolling_fingerprints, simd, token_array};

    use pyo3::prelude::*;

    /// The base that an index made with `seed` uses.
    #[pyfunction]
    fn base_for_seed(seed: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(super::base_for_seed(super::number("seed", seed, 0, u64::MAX)?))
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("MAX_CHUNK_HASH_BYTES", super::MAX_CHUNK_HASH_BYTES)
    }
}
