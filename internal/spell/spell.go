// Package spell finds the word that was probably meant.
package spell

import "strings"

// Nearest returns the known word that was probably meant, or "" if none is close. A word
// is close if it begins with the given one (the shortest of several counts), or if at most a third of the letters of the
// given word have to change, or a quarter of them to make it a beginning. Case does not
// count.
func Nearest(word string, known []string) string {
	word = strings.ToLower(word)
	if len(word) < 2 {
		return "" // any short word would do
	}
	longer := ""
	for _, k := range known {
		if strings.HasPrefix(strings.ToLower(k), word) && (longer == "" || len(k) < len(longer)) {
			longer = k
		}
	}
	if longer != "" {
		return longer
	}
	best, least := "", len(word)
	for _, k := range known {
		lower := strings.ToLower(k)
		if d := Distance(word, lower); d <= max(1, len(word)/3) && d < len(lower) && d < least {
			best, least = k, d
		}
		if n := len(word); n >= 4 && n < len(lower) {
			if d := Distance(word, lower[:n]); d <= n/4 && d < least {
				best, least = k, d
			}
		}
	}
	return best
}

// Distance returns the number of letters to insert, delete, replace or swap with
// their neighbour on the way from a to b.
func Distance(a, b string) int {
	before, row, next := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next[0] = i + 1
		for j := range len(b) {
			replace := row[j]
			if a[i] != b[j] {
				replace++
			}
			next[j+1] = min(replace, row[j+1]+1, next[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row, next = row, next, before
	}
	return row[len(b)]
}
