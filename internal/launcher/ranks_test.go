package launcher

import "testing"

func TestRanksInWords(t *testing.T) {
	many := []int{3}
	for i := range 20 {
		many = append(many, 4*i)
	}
	for _, c := range []struct {
		ranks []int
		want  string
	}{{[]int{3}, "rank 3"}, {[]int{2, 0}, "ranks 0 and 2"}, {[]int{0, 1}, "ranks 0 and 1"}, {[]int{9, 0, 1, 2, 3}, "ranks 0 to 3 and 9"}, {[]int{1, 2, 3}, "ranks 1 to 3"}, {[]int{1, 3, 5}, "ranks 1, 3 and 5"}, {[]int{8, 0, 4, 12}, "ranks 0 to 12 in steps of 4"}, {many, "ranks 0, 3, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56 and 5 others"}} {
		if got := Ranks(c.ranks); got != c.want {
			t.Errorf("%v: %s, want %s", c.ranks, got, c.want)
		}
	}
}
