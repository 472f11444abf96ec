//! Spans of query tokens: how much they cover, and which to take so that none overlap.

/// Number of distinct tokens in the spans `start..end`, overlaps counted once. An empty or reversed span has none.
pub fn coverage(spans: impl IntoIterator<Item = (i64, i64)>) -> u64 {
    let mut spans: Vec<(i64, i64)> = spans.into_iter().filter(|(start, end)| start < end).collect();
    spans.sort_unstable();
    let mut covered = 0;
    let mut reached = i64::MIN;
    for (start, end) in spans {
        if end > reached {
            covered += end.abs_diff(start.max(reached));
            reached = end;
        }
    }
    covered
}

/// Indices of the spans that start at or after `prefix` and, taken in order of their start, at or after the end of the
/// one taken before. Of several that start together the first in the input is taken.
pub fn non_overlapping(spans: &[(i64, i64)], prefix: i64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..spans.len()).filter(|&n| spans[n].0 >= prefix).collect();
    order.sort_by_key(|&n| spans[n].0);
    let mut free_from = i64::MIN;
    order.retain(|&n| {
        let (start, end) = spans[n];
        let fits = start >= free_from;
        if fits {
            free_from = end;
        }
        fits
    });
    order
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn spans() -> impl Strategy<Value = Vec<(i64, i64)>> {
        prop::collection::vec((0i64..60, 0i64..12).prop_map(|(start, len)| (start, start + len)), 0..20)
    }

    proptest! {
        #[test]
        fn coverage_counts_tokens(spans in spans()) {
            let tokens: HashSet<i64> = spans.iter().flat_map(|&(start, end)| start..end).collect();
            prop_assert_eq!(coverage(spans), tokens.len() as u64);
        }

        #[test]
        fn selection_is_greedy_after_the_prefix(spans in spans(), prefix in 0i64..40) {
            let taken = non_overlapping(&spans, prefix);
            for pair in taken.windows(2) {
                prop_assert!(spans[pair[0]].1 <= spans[pair[1]].0);
            }
            for (n, span) in spans.iter().enumerate() {
                let clashes = |&t: &usize| t == n || (spans[t].0 <= span.0 && span.0 < spans[t].1);
                prop_assert_eq!(span.0 < prefix || taken.iter().any(clashes), true);
                prop_assert!(span.0 >= prefix || !taken.contains(&n));
            }
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        assert_eq!(coverage([(i64::MIN, i64::MAX)]), u64::MAX);
        assert_eq!(coverage([(5, 5), (7, 6)]), 0);
    }
}
